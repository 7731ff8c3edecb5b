"""What a request reads that goes on from earlier ones: what they read and replied, as if it had been sent at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from multimodal_family import FAMILIES, Case, assert_equal, context, request_of

from segue.media.parts import PYTHON_POLICY, messages_from
from segue.messages.errors import InvalidRequest
from segue.messages.request import Earlier, Message, Request
from segue.models.omni.multimodal_lm.input import InputProcessor
from segue.models.omni.multimodal_lm.stages import STAGE_MODELS
from segue.models.omni.multimodal_lm.tiny import presets as tiny
from segue.models.omni.multimodal_lm.tiny.config import SMALL

REPLY = [300, 41, 7]
TALKS: dict[str, tuple[Case, ...]] = {
    "a text": (Case("", "what is this", (("image", 1),)), Case("", "and what is behind it?")),
    "another": (Case("", "what is this", (("image", 1),)), Case("", "and this?", (("image", 2),))),
    "a late one": (Case("", "good morning"), Case("", "hello"), Case("", "see:", (("image", 1),))),
    "all turns": tuple(Case("", f"and {seed}?", (("image", seed), ("image", seed + 3))) for seed in (1, 2, 1)),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, directory in made.items():
        tiny.make(family, directory)
    return made


@pytest.fixture(scope="module")
def stages(directories: dict[str, Path]) -> dict[str, InputProcessor]:
    return {family: STAGE_MODELS["input"](context(path, "input")) for family, path in directories.items()}


def turns_of(family: str, talk: str) -> list[Request]:
    kind = "audio" if family == "qwen2-audio" else "image"
    cases = (Case(one.name, one.text, tuple((kind, seed) for _, seed in one.media)) for one in TALKS[talk])
    return [request_of(case) for case in cases]


def after(turns: list[Request], reply: list[int]) -> Request:
    *before, last = turns
    last.earlier = [Earlier(one, reply) for one in before]
    return last


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_all(stages: dict[str, InputProcessor], family: str, talk: str) -> None:
    stage, turns = stages[family], turns_of(family, talk)
    begun = stage.process(turns[0])["token_ids"].tolist()
    made = stage.process(after(turns, REPLY))
    ids = made["token_ids"].tolist()
    assert ids[: len(begun) + len(REPLY)] == [*begun, *REPLY]
    media = [part for turn in turns for part in turn.media()]
    if family == "llava-onevision" and len(media) > 1:  # its processor takes those of one prompt otherwise
        units = [unit for turn in turns_of(family, talk) for unit in stage.process(turn)["media"]]
        assert [unit["hash"] for unit in made["media"]] == [unit["hash"] for unit in units]
        row = stage._processor.rows["image"]
        places = [place for unit in made["media"] for place in unit["places"].tolist()]
        assert places == [place for place, token in enumerate(ids) if token == row]
    else:
        whole = Request(request_id="r", prompt_token_ids=ids, messages=[Message("user", [*media])])
        assert_equal(made, stage.process(whole))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_is_what_the_template_writes(stages: dict[str, InputProcessor], family: str) -> None:
    """Once, if the reply was cut off, and if it has ended by the token that the template writes after it."""
    stage, turns = stages[family], turns_of(family, "a text")
    begun = len(stage.process(turns[0])["token_ids"])
    made = stage.process(after(turns, REPLY))
    messages = [turns[0].messages[0], *messages_from([{"role": "assistant", "content": "yes"}], PYTHON_POLICY)]
    chat = Request(request_id="r", messages=[*messages, *turns[1].messages])
    follows = made["token_ids"].tolist()[begun + len(REPLY) :]
    assert stage.process(chat)["token_ids"].tolist()[-len(follows) :] == follows
    assert follows[0] == SMALL[family].id_of(SMALL[family].end)
    assert_equal(stage.process(after(turns, [*REPLY, follows[0]])), made)


def test_prompts_follow_without_the_template(stages: dict[str, InputProcessor]) -> None:
    stage, turns = stages["gemma3-vision"], turns_of("gemma3-vision", "another")
    text = "so <start_of_image> there"
    ids = stage._processor.plain(text, add_special_tokens=False)
    media = [Message("user", [*turns[1].media()])]
    prompts: tuple[dict[str, Any], ...] = ({"prompt": text}, {"prompt_token_ids": ids})
    one, other = (
        stage.process(after([turns[0], Request(request_id="r", messages=media, **prompt)], REPLY)) for prompt in prompts
    )
    assert_equal(one, other)
    begun = stage.process(turns[0])["token_ids"].tolist()
    before = [*begun, *REPLY, *ids[: ids.index(stage._processor.placeholder_ids["image"])]]
    assert one["token_ids"].tolist()[: len(before)] == before


def test_what_cannot_go_on(directories: dict[str, Path], tmp_path: Path) -> None:
    directory = directories["qwen3-vl"]
    turns = turns_of("qwen3-vl", "another")
    small = InputProcessor(context(directory, "input", options={"limits": {"max_items": 1}}))
    with pytest.raises(InvalidRequest, match="messages has 2 media parts; at most 1"):
        small.process(after(turns, REPLY))
    embedded = Request(request_id="e", prompt_embeds=b"rows")
    with pytest.raises(InvalidRequest, match="a part of the conversation is prompt_embeds") as caught:
        small.process(after([embedded, turns[0]], REPLY))
    assert caught.value.field == "previous"
    for path in directory.iterdir():
        if path.name != "chat_template.json":
            (tmp_path / path.name).symlink_to(path)
    bare = InputProcessor(context(tmp_path, "input"))
    with pytest.raises(InvalidRequest, match="previous is set, but this checkpoint has no chat template"):
        bare.process(after(turns, REPLY))
    follows = Request(request_id="r", prompt_token_ids=[5, 6])
    assert bare.process(after([turns[0], follows], REPLY))["token_ids"].tolist()[-2:] == [5, 6]
