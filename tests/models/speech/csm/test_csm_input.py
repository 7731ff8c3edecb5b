"""The input stage: the library's ids, and what is refused."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from csm_family import BY_NAME, RATE, context, processed, recording, request_of

from segue.messages.errors import InvalidRequest, NotFound
from segue.messages.request import ArrayInfo, MediaPart, Message, Request, TextPart
from segue.models.speech.csm.input import InputProcessor
from segue.models.speech.csm.tiny.config import IDS


@pytest.fixture(scope="module")
def stage(tiny_dir: Path) -> InputProcessor:
    return InputProcessor(context(tiny_dir, "input"))


def audio() -> MediaPart:
    samples = recording(1920)
    return MediaPart("audio", samples.tobytes(), ArrayInfo("float32", samples.shape, RATE))


def asked(*messages: Message, **fields: Any) -> Request:
    return Request(request_id="r", messages=list(messages), **fields)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_ids_are_those_of_the_librarys_processor(tiny_dir: Path, stage: InputProcessor, name: str) -> None:
    """One id per recording here, one per frame there."""
    expected = processed(tiny_dir, BY_NAME[name])["input_ids"][0].tolist()
    alike = [token for token, run in groupby(expected) for _ in ([0] if token == IDS["<|AUDIO|>"] else run)]
    made = stage.process(request_of(BY_NAME[name]))
    assert made["token_ids"].tolist() == alike
    assert [len(item["samples"]) for item in made["media"]] == [t.samples for t in BY_NAME[name].turns if t.samples]


def test_a_bare_prompt_names_its_speaker_itself(stage: InputProcessor) -> None:
    message = asked(Message("user", [TextPart("Hello there")]), voice="1")
    prompt = Request(request_id="r", prompt="[1]Hello there")
    assert torch.equal(stage.process(message)["token_ids"], stage.process(prompt)["token_ids"])


def test_recordings_beside_a_prompt_are_a_conversation(stage: InputProcessor) -> None:
    conversation = asked(Message("user", [TextPart("Who is it?"), audio()]), Message("user", [TextPart("Hi")]))
    expected = stage.process(conversation)
    media = [Message("user", [audio()])]
    text = "[0]Who is it?<|end_of_text|><|AUDIO|><|audio_eos|><|begin_of_text|>[0]Hi"
    for prompt in ({"prompt": text}, {"prompt_token_ids": expected["token_ids"].tolist()}):
        made = stage.process(Request(request_id="r", messages=media, **prompt))
        assert torch.equal(made["token_ids"], expected["token_ids"])
        assert made["media"][0]["hash"] == expected["media"][0]["hash"]
    with pytest.raises(InvalidRequest, match="1 placeholder for audio, but multi_modal_data has 2 audio: write"):
        stage.process(Request(request_id="r", messages=media * 2, prompt=text))


def test_a_messages_name_is_its_speaker(stage: InputProcessor) -> None:
    named = asked(Message("user", [TextPart("Hello there")], {"name": "3"}), voice="1")
    other = asked(Message("user", [TextPart("Hello there")]), voice="3")
    assert torch.equal(stage.process(named)["token_ids"], stage.process(other)["token_ids"])


def test_the_voice_of_a_recording_is_a_message_before_the_text(stage: InputProcessor) -> None:
    voice = MediaPart("audio", audio().data, audio().array, role="voice")
    cloned = asked(Message("user", [voice, TextPart("Hi")]), options={"ref_text": "Who is it?"})
    conversation = asked(Message("user", [TextPart("Who is it?"), audio()]), Message("user", [TextPart("Hi")]))
    one, other = stage.process(cloned), stage.process(conversation)
    assert torch.equal(one["token_ids"], other["token_ids"])
    assert one["media"][0]["hash"] == other["media"][0]["hash"]
    for request in (asked(cloned.messages[0]), asked(Message("user", [TextPart("Hi")]), options={"ref_text": "x"})):
        with pytest.raises(InvalidRequest, match=r"a recording of a voice and ref_text, .* belong together"):
            stage.process(request)


def test_no_text_becomes_a_special_token(stage: InputProcessor) -> None:
    text = "say <|AUDIO|> and <|end_of_text|>"
    ids = stage.process(asked(Message("user", [TextPart(text)])))["token_ids"].tolist()
    assert sum(token in IDS.values() for token in ids) == 2, "the turn's begin and end"


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([Message("user", [TextPart(" ")])], r"messages\[0\] has no text"),
        ([Message("system", [TextPart("Hi")])], r"messages\[0\].role is 'system'; a speaker is a number such as '0'"),
        ([Message("user", [TextPart("Hi")], {"name": "Ann"})], r"messages\[0\].name is 'Ann'; a speaker is a number"),
        ([Message("0", [TextPart("Hi")]), Message("0", [TextPart("Hi")])], r"messages\[0\] has 0 recordings"),
        ([Message("0", [TextPart("Hi"), audio()])], r"messages\[0\] has a recording; the last message is the text"),
        ([Message("0", [MediaPart("image", b""), TextPart("Hi")])], "is image; this model takes text and audio"),
    ],
)
def test_what_is_no_conversation_is_named(stage: InputProcessor, messages: list[Message], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        stage.process(asked(*messages))


def test_unknown_voices_and_recordings_without_samples(stage: InputProcessor) -> None:
    with pytest.raises(NotFound, match="voice is 'nova'"):
        stage.process(asked(Message("user", [TextPart("Hi")]), voice="nova"))
    with pytest.raises(InvalidRequest, match="prompt has 1 placeholder for audio, but multi_modal_data has 0 audio"):
        stage.process(Request(request_id="r", prompt="[0]<|AUDIO|>"))
    with pytest.raises(InvalidRequest, match="ids of this model are from 0 to 671"):
        stage.process(Request(request_id="r", prompt_token_ids=[672]))
