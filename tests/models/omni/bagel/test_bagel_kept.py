"""What a request reads that goes on from earlier ones: what they read and replied, as if it had been sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bagel_stages import CPU, request_of

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest
from segue.messages.request import ArrayInfo, Earlier, MediaPart, Request
from segue.models.omni.bagel.input import THINK, InputProcessor
from segue.models.omni.bagel.prompt.passages import END

SIZE = (60, 90)
FEW = DiffusionParams(num_inference_steps=4)


@pytest.fixture(scope="module")
def stage(tiny_dir: Path) -> InputProcessor:
    return InputProcessor(LoadContext(tiny_dir, "input", CPU, torch.float32))


@pytest.fixture
def ids(tiny_dir: Path) -> Any:
    from segue.models.shared.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tiny_dir)
    assert tokenizer is not None
    end = tokenizer.get_vocab()[END]

    def of(text: str, *, ended: bool = True) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*found, end] if ended else found

    return of


def shown() -> MediaPart:
    """The image that `request_of` makes of `SIZE`, as the reply had it."""
    part = request_of([SIZE]).media()[0]
    assert part.array is not None
    return MediaPart("image", part.data, ArrayInfo("uint8", part.array.shape))


def same(one: Payload, other: Payload) -> None:
    assert [image["hash"] for image in one["media"]] == [image["hash"] for image in other["media"]]
    for key in ("token_ids", "positions"):
        assert (key in one) == (key in other)
        assert key not in one or torch.equal(one[key], other[key])
    assert one.get("passages") == other.get("passages")


def after(request: Request, *earlier: Earlier) -> Request:
    request.earlier = list(earlier)
    return request


def test_texts_and_images_by_turns(stage: InputProcessor, ids: Any) -> None:
    first, second = ids("A boat leaves."), ids("It is gone", ended=False)
    story = request_of(["Tell of a boat"], modalities=["text", "image"], options={"interleave": 1})
    told = Earlier(story, [*first, *second], [len(first), len(first) + len(second)], [shown()])
    whole = ["Tell of a boat", "A boat leaves.", SIZE, "It is gone", "Where to?"]
    same(stage.process(after(request_of(["Where to?"]), told)), stage.process(request_of(whole)))


def test_an_image_and_the_thoughts_before_it(stage: InputProcessor, ids: Any) -> None:
    drawn = request_of(["Draw a boat"], modalities=["text", "image"], diffusion=FEW)
    told = Earlier(drawn, ids("A small one."), [], [shown(), shown()])
    asked: dict[str, Any] = {"modalities": ["image"], "diffusion": FEW}
    going_on = stage.process(after(request_of(["Make it red"], **asked), told))
    whole = [THINK, "Draw a boat", "A small one.", SIZE, SIZE, "Make it red"]
    same(going_on, stage.process(request_of(whole, **asked)))
    assert going_on["drawing"]["given"] == stage.process(request_of(whole, **asked))["drawing"]["given"]


def test_a_reply_to_messages_and_to_a_prompt(stage: InputProcessor, ids: Any) -> None:
    said = Earlier(request_of([SIZE, "What is it?"]), ids("A boat", ended=False))
    again = Earlier(request_of(["Whose?"]), ids("Mine."))
    whole = [SIZE, "What is it?", "A boat", "Whose?", "Mine.", "Since when?"]
    same(stage.process(after(request_of(["Since when?"]), said, again)), stage.process(request_of(whole)))
    bare = Request(request_id="bare", prompt="Once")
    follows = Request(request_id="r", prompt=" a time", earlier=[Earlier(bare, ids(" upon", ended=False))])
    assert stage.process(follows)["token_ids"].tolist() == [
        *ids("Once", ended=False), *ids(" upon", ended=False), *ids(" a time", ended=False),
    ]  # fmt: skip


def test_all_images_count(tiny_dir: Path) -> None:
    small = InputProcessor(LoadContext(tiny_dir, "input", CPU, torch.float32, options={"limits": {"max_items": 2}}))
    told = Earlier(request_of([SIZE, "Whose?"]), [5], [], [shown()])
    with pytest.raises(InvalidRequest, match="messages has 3 media parts; at most 2"):
        small.process(after(request_of([SIZE, "And this?"]), told))
