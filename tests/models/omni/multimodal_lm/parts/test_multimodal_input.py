"""The input stage of models that see or hear: what it makes of requests, and what it says to those that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from multimodal_family import FAMILIES, SEES, TEXT, Case, context, medium, processed, request_of

from segue.media.parts import PYTHON_POLICY, messages_from
from segue.messages.errors import ConfigError, InvalidRequest, TooLarge, TooLong
from segue.messages.request import ChatOptions, Request
from segue.messages.sampling import SamplingParams
from segue.models.omni.multimodal_lm.input import InputProcessor
from segue.models.omni.multimodal_lm.tiny import presets as tiny
from segue.models.shared.library import AutoTokenizer

IMAGES = Case("images", "how do these differ", (("image", 1), ("image", 2)))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family in FAMILIES:
        made[family] = tmp_path_factory.mktemp(family)
        tiny.make(family, made[family])
    return made


@pytest.fixture(scope="module")
def stages(directories: dict[str, Path]) -> dict[str, InputProcessor]:
    return {family: InputProcessor(context(directory, "input")) for family, directory in directories.items()}


def said(content: Any, **more: Any) -> Request:
    return Request(
        request_id="r", messages=messages_from([{"role": "user", "content": content}], PYTHON_POLICY), **more
    )


# --- what it makes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SEES)
def test_several_turns_with_images(
    directories: dict[str, Path], stages: dict[str, InputProcessor], family: str
) -> None:
    """A chat: system, images in two turns, a reply between them."""
    turns = [
        ("system", [], "You are brief."),
        ("user", [1], "what is this"),
        ("assistant", [], "A house."),
        ("user", [2], "and this?"),
    ]
    messages = [
        {"role": role, "content": [*({"type": "image", "image": medium("image", s)} for s in seeds), text_part(text)]}
        for role, seeds, text in turns
    ]
    payload = stages[family].process(Request(request_id="r", messages=messages_from(messages, PYTHON_POLICY)))
    text = AutoTokenizer.from_pretrained(directories[family]).decode(payload["token_ids"])
    assert [text.index(words) for _, _, words in turns] == sorted(text.index(words) for _, _, words in turns)
    assert sum(len(unit["places"]) for unit in payload["media"]) == sum(
        len(unit["places"]) for unit in stages[family].process(request_of(IMAGES))["media"]
    )


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_an_image_is_the_same_wherever_it_stands(stages: dict[str, InputProcessor]) -> None:
    stage = stages["qwen3-vl"]
    one, two = stage.process(request_of(IMAGES))["media"]
    turned = stage.process(request_of(replace(IMAGES, media=IMAGES.media[::-1])))["media"]
    assert [unit["hash"] for unit in turned] == [two["hash"], one["hash"]]
    alone = stage.process(request_of(replace(IMAGES, media=IMAGES.media[:1])))["media"]
    assert alone[0]["hash"] == one["hash"] != two["hash"]


def test_what_a_processor_treats_otherwise_beside_others_is_one_unit(stages: dict[str, InputProcessor]) -> None:
    stage = stages["llava-onevision"]  # tiles for an image that is alone
    [unit] = stage.process(request_of(IMAGES))["media"]
    [alone] = stage.process(request_of(replace(IMAGES, media=IMAGES.media[:1])))["media"]
    assert unit["alone"]
    assert not alone["alone"]
    assert unit["tensors"]["pixel_values"].shape[:2] == (2, 1)
    assert alone["tensors"]["pixel_values"].shape[1] > 1


def test_one_pixel_changes_the_hash(stages: dict[str, InputProcessor]) -> None:
    pixels = medium("image", 1)
    other = pixels.copy()
    other[:14, :14] ^= 0xFF
    first, second = (
        stages["qwen2.5-vl"].process(said([{"type": "image", "image": image}]))["media"][0]["hash"]
        for image in (pixels, other)
    )
    assert first != second


def test_the_same_clip_at_another_pace_is_something_else(stages: dict[str, InputProcessor]) -> None:
    clip = medium("video", 5)
    first, second = (
        stages["qwen2.5-vl"].process(said([{"type": "video", "video": (clip, rate)}])) for rate in (2.0, 1.0)
    )
    assert first["media"][0]["hash"] != second["media"][0]["hash"]
    assert not torch.equal(first["positions"], second["positions"])


@pytest.mark.parametrize("family", FAMILIES)
def test_text_needs_no_media(directories: dict[str, Path], stages: dict[str, InputProcessor], family: str) -> None:
    payload = stages[family].process(request_of(TEXT))
    assert payload["media"] == []
    assert "positions" not in payload
    assert torch.equal(payload["token_ids"], processed(directories[family], TEXT)["input_ids"][0])
    prompt = stages[family].process(Request(request_id="r", prompt="Good morning"))["token_ids"]
    assert prompt.tolist() == AutoTokenizer.from_pretrained(directories[family])("Good morning")["input_ids"]
    ids = stages[family].process(Request(request_id="r", prompt_token_ids=[3, 4, 5]))["token_ids"]
    assert ids.tolist() == [3, 4, 5]


def test_tokens_for_the_client(stages: dict[str, InputProcessor]) -> None:
    request = request_of(IMAGES)
    request.modalities = ["tokens"]
    payload = stages["qwen3-vl"].process(request)
    assert payload["tokens"]["token_ids"] == payload["token_ids"].tolist()
    assert payload["tokens"]["token_strs"].count("<|image_pad|>") == sum(len(u["places"]) for u in payload["media"])


def test_a_reply_is_continued(stages: dict[str, InputProcessor], directories: dict[str, Path]) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good"}]
    request = Request(
        request_id="r",
        messages=messages_from(messages, PYTHON_POLICY),
        chat=ChatOptions(add_generation_prompt=False, continue_final_message=True),
    )
    ids = stages["qwen3-vl"].process(request)["token_ids"]
    assert AutoTokenizer.from_pretrained(directories["qwen3-vl"]).decode(ids).endswith("assistant\nGood")


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "request_made", "words", "name"),
    [
        ("qwen2-audio", lambda: request_of(IMAGES), "is image; this model takes text, audio", "messages"),
        (
            "qwen3-vl",
            lambda: said([{"type": "audio", "audio": medium("audio", 1)}]),
            "is audio; this model takes text, image, video",
            "messages",
        ),
        ("qwen3-vl", lambda: said("see <|image_pad|>"), "stands for image; send messages with a part", "messages[0]"),
        ("qwen2-audio", lambda: Request(request_id="r", prompt="hear <|AUDIO|>"), "1 placeholder for audio", "prompt"),
        (
            "qwen3-vl",
            lambda: Request(request_id="r", prompt_token_ids=[672]),
            "ids of this model are from 0 to 671",
            "",
        ),
        (
            "qwen2-audio",
            lambda: said([{"type": "audio", "audio": np.zeros(31 * 16_000, np.float32)}]),
            "is 31.0 seconds long; this model takes 30 seconds",
            "messages",
        ),
        (
            "qwen2-audio",
            lambda: said([{"type": "audio", "audio": np.zeros(300, np.float32)}]),
            "too small or too short",
            "messages",
        ),
        (
            "qwen3-vl",
            lambda: said([{"type": "image", "image": np.zeros((4, 2000, 3), np.uint8)}]),
            "this model's processor refuses the media: .*aspect ratio",
            "messages",
        ),
        (
            "llava-onevision",
            lambda: request_of(Case("clips", "?", (("video", 6), ("video", 7)))),
            "this model's processor refuses the media",
            "messages",
        ),
    ],
)
def test_wrong_requests(
    stages: dict[str, InputProcessor], family: str, request_made: Callable[[], Request], words: str, name: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        stages[family].process(request_made())
    assert (caught.value.field or "").startswith(name)


def test_a_prompt_that_is_too_long_says_what_it_is_made_of(directories: dict[str, Path]) -> None:
    stage = InputProcessor(context(directories["qwen3-vl"], "input", max_model_len=100))
    with pytest.raises(TooLong, match=r"the prompt has \d+ tokens \(\d+ of them image\); the context is 100 tokens"):
        stage.process(request_of(IMAGES))


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(directories: dict[str, Path]) -> None:
    stage = InputProcessor(context(directories["qwen3-vl"], "input", max_model_len=100))
    for count, says in ((6000, "more than 200 tokens; the context is 100 tokens"), (300_000, "1048576 are taken")):
        messages = messages_from([{"role": "user", "content": "sea " * count}], PYTHON_POLICY)
        for request in (Request(request_id="r", messages=messages), Request(request_id="r", prompt="sea " * count)):
            with pytest.raises(TooLong, match=says):
                stage.process(request)


def test_limits_of_the_deployment_hold(directories: dict[str, Path]) -> None:
    stage = InputProcessor(context(directories["qwen3-vl"], "input", options={"limits": {"max_image_pixels": 100}}))
    with pytest.raises(TooLarge, match="max_image_pixels"):
        stage.process(request_of(IMAGES))


def test_a_template_with_no_place_for_a_medium(directories: dict[str, Path], tmp_path: Path) -> None:
    for path in directories["qwen3-vl"].iterdir():
        if path.name != "chat_template.json":
            (tmp_path / path.name).symlink_to(path)
    stage = InputProcessor(context(tmp_path, "input"))
    with pytest.raises(InvalidRequest, match="no chat template"):
        stage.process(request_of(TEXT))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    stage = InputProcessor(context(tmp_path, "input"))
    with pytest.raises(InvalidRequest, match="renders 0 placeholders for image; the messages have 2"):
        stage.process(request_of(IMAGES))


def test_a_processor_that_cannot_be_read(directories: dict[str, Path], tmp_path: Path) -> None:
    for path in directories["qwen3-vl"].iterdir():
        if path.name != "preprocessor_config.json":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "preprocessor_config.json").write_text("[")
    with pytest.raises(ConfigError, match="the processor cannot be read"):
        InputProcessor(context(tmp_path, "input"))


@pytest.mark.parametrize("family", SEES)
def test_media_cannot_be_cut(stages: dict[str, InputProcessor], family: str) -> None:
    request = request_of(IMAGES)
    whole = stages[family].process(request)["token_ids"].tolist()
    request.sampling = {"llm": SamplingParams(truncate_prompt_tokens=len(whole))}
    assert stages[family].process(request)["token_ids"].tolist() == whole
    request.sampling = {"llm": SamplingParams(truncate_prompt_tokens=len(whole) - 1)}
    with pytest.raises(InvalidRequest, match="contains media, which cannot be cut") as caught:
        stages[family].process(request)
    assert caught.value.field == "sampling.llm.truncate_prompt_tokens"
