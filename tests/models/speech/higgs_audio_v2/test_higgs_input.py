"""The input stage: what it takes, and what it refuses by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from higgs_family import context

from segue.messages.errors import InvalidRequest, NotFound, TooLong
from segue.messages.request import MediaPart, Message, Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.models.speech.higgs_audio_v2.input import InputProcessor


@pytest.fixture(scope="module")
def processor(tiny_dir: Path) -> InputProcessor:
    return InputProcessor(context(tiny_dir, "input"))


def said(role: str, text: str) -> Message:
    return Message(role, [TextPart(text)])


def asked(*messages: Message, **more: Any) -> Request:
    return Request(request_id="r", messages=list(messages), **more)


def ids(processor: InputProcessor, request: Request) -> list[int]:
    return processor.process(request)["token_ids"].tolist()


def test_instructions_describe_the_scene(processor: InputProcessor) -> None:
    user, scene = said("user", "Hello"), said("scene", " A quiet room. ")
    described = ids(processor, asked(scene, user))
    assert ids(processor, asked(user, options={"instructions": "A quiet room."})) == described
    assert ids(processor, asked(user)) != described
    assert ids(processor, Request(request_id="r", prompt="Hello")) == ids(processor, asked(user))
    system = said("system", "Generate audio following instruction.")
    assert ids(processor, asked(system, user)) == ids(processor, asked(user))
    assert ids(processor, asked(said("system", "Sing."), user)) != ids(processor, asked(user))


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (asked(said("user", " ")), InvalidRequest, "messages has no text to say"),
        (asked(said("user", "a"), said("user", "b")), InvalidRequest, "of the roles user, user; this model takes"),
        (asked(said("user", "a"), voice="nova"), NotFound, "voice is 'nova'; this model has no voices: describe one"),
        (
            asked(Message("user", [MediaPart("audio", b""), TextPart("a")])),
            InvalidRequest,
            "speech in the voice of a recording is not served",
        ),
        (
            asked(said("scene", "x"), said("user", "a"), options={"instructions": "y"}),
            InvalidRequest,
            "both describe the scene",
        ),
        (asked(said("user", "a"), options={"instructions": 3}), InvalidRequest, "options.instructions is 3"),
        (Request(request_id="r", prompt_token_ids=[1]), InvalidRequest, "send a message in place of prompt_token_ids"),
        (
            asked(said("user", "a"), sampling={"llm": SamplingParams(truncate_prompt_tokens=3)}),
            InvalidRequest,
            "this model says its whole text",
        ),
        (asked(said("user", "many words " * 2000)), TooLong, "the context is 2048 tokens"),
    ],
)
def test_what_is_refused(processor: InputProcessor, request_: Request, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        processor.process(request_)
