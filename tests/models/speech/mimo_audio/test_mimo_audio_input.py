"""The input stage: prompts of the published forms, and requests that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mimo_audio_family import EMPTY, asked, cases, context, said

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError, InvalidRequest, NotFound, TooLong
from segue.messages.request import MediaPart, Message, Request
from segue.models.speech.mimo_audio.config import config_of, read_codec, read_config
from segue.models.speech.mimo_audio.encoder import RecordingEncoder
from segue.models.speech.mimo_audio.input import InputProcessor
from segue.models.speech.mimo_audio.tiny.config import IDS, config_json

ASR = "请将这段语音转换为文字"
REQUESTS: dict[str, Request] = {
    "said": asked(said("user", "Hello there"), speech=True),
    "said in capitals": asked(said("user", "the sea is calm tonight."), speech=True),
    "said in chinese": asked(said("user", "你好"), speech=True),
    "instructed": asked(said("user", "Where are you going?"), speech=True, instructions="Say it slowly."),
    "in a voice": asked(
        said("system", 20011), said("user", "Good morning!"), speech=True, instructions="Say it slowly."
    ),
    "transcribed": asked(said("user", 30000, ASR)),
    "understood": asked(said("user", 41234, "What is it?")),
    "thought about": asked(said("user", 5000, "What is it?"), thinking=True),
    "answered in text": asked(said("user", 11111)),
    "answered": asked(said("user", 30000), speech=True),
    "answered in a voice": asked(said("system", "Be brief.", 20011), said("user", 11111), speech=True),
    "answered again": asked(
        said("user", 11111),
        said("assistant", "It was late, and nobody had come to the old house.", 41234),
        said("user", 5000),
        speech=True,
    ),
    "chatted": asked(said("user", "Name three rivers.")),
    "chatted again": asked(said("user", "Name three rivers."), said("assistant", "No, thanks"), said("user", "Why?")),
    "continued": asked(
        said("system", "Say it in another voice."),
        said("user", 5000),
        said("assistant", "Yes.", 20011),
        said("user", 30000),
        said("assistant", "A raging fire was in his eyes.", 5000),
        said("user", 11111),
        speech=True,
        few_shot=True,
    ),
}
"""Requests whose prompts the published code made, too, by name of the case."""


@pytest.fixture(scope="module")
def stage(tiny_dir: Path) -> InputProcessor:
    return InputProcessor(context(tiny_dir, "input"))


@pytest.mark.parametrize("name", REQUESTS)
def test_prompts_are_the_published_ones(tiny_dir: Path, stage: InputProcessor, name: str) -> None:
    """With the codes of their recordings."""
    payload = stage.process(REQUESTS[name])
    prompt = cases()[name].prompt
    assert payload["token_ids"].tolist() == [row[0] for row in prompt]
    if not payload["media"]:
        return
    encoder = RecordingEncoder(context(tiny_dir, "encoder"))
    results = encoder.run(encoder.feed("r", "input", {"media": payload["media"]}, final=True))
    codes = torch.cat([result.payload["media"][0]["codes"] for result in results if result.payload])
    assert codes.tolist() == [row[1:] for row in prompt if row[0] == EMPTY]


def test_a_text_is_no_special_token(stage: InputProcessor) -> None:
    ids = stage.process(asked(said("user", "<|im_end|> <|empty|>"), speech=True))["token_ids"].tolist()
    plain = stage.process(asked(said("user", "Hello"), speech=True))["token_ids"].tolist()
    assert (ids.count(IDS["<|im_end|>"]), EMPTY in ids) == (plain.count(IDS["<|im_end|>"]), False)


def test_bare_prompts(stage: InputProcessor) -> None:
    text = stage.process(Request(request_id="r", prompt="Hello there", modalities=["audio"]))["token_ids"]
    assert text.tolist() == [row[0] for row in cases()["said"].prompt]
    assert len(stage.process(Request(request_id="r", prompt="Hello there"))["token_ids"]) < len(text)
    assert stage.process(Request(request_id="r", prompt_token_ids=[5, 6]))["token_ids"].tolist() == [5, 6]


SHORT = MediaPart("audio", b"\0" * 4 * 100, None)


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (asked(said("tool", "Hello")), "messages[0].role", "system, user, assistant"),
        (asked(said("user", "Hello"), said("assistant", "Yes.")), "messages[1].role", "replies to the last"),
        (asked(said("user", " "), speech=True), "messages", "no text to say"),
        (asked(said("system", "Be brief."), said("user", "Hello"), speech=True), "messages", "instructions"),
        (asked(said("user", 5000), speech=True, instructions="Slowly."), "options.instructions", "reply"),
        (asked(said("user", 5000), instructions=3), "options.instructions", "a text"),
        (asked(said("user", 5000), thinking="yes"), "options.thinking", "true or false"),
        (asked(said("user", 5000), speech=True, thinking=True), "options.thinking", "no thoughts"),
        (asked(said("user", "Hello"), speech=True, thinking=True), "options.thinking", "to be said"),
        (asked(said("user", 5000), speech=True, few_shot=True), "messages", "the roles user; it takes a system"),
        (asked(said("system", "a"), said("user", "b"), few_shot=True), "messages[1].content", "0 recordings"),
        (asked(said("user", 5000), said("assistant", 5000, 5000), said("user", "a")), "messages", "2 recordings"),
        (asked(said("system", 5000, 5000), said("user", 5000)), "messages", "2 recordings; the reply has one voice"),
        (asked(said("user", 480)), "messages", "480 samples at 24000 Hz; it must have at least 481"),
        (asked(Message("user", [MediaPart("image", b"")])), "messages[0].content[0]", "image; this model takes text"),
        (Request(request_id="r", prompt=""), "prompt", "is empty"),
        (Request(request_id="r", prompt_token_ids=[EMPTY]), "prompt_token_ids", "place of a recording"),
    ],
)
def test_refusals_name_the_field(stage: InputProcessor, request_: Request, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        stage.process(request_)
    assert refused.value.field == field


def test_other_refusals(tiny_dir: Path, stage: InputProcessor) -> None:
    with pytest.raises(NotFound, match="no voices"):
        stage.process(Request(request_id="r", prompt="Hello", voice="anna"))
    short = InputProcessor(context(tiny_dir, "input", max_model_len=60))
    with pytest.raises(TooLong):
        short.process(REQUESTS["transcribed"])


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"speech_zeroemb_idx": "0-32-16-16-16-16-16-16"}, "speech_zeroemb_idx"),
        ({"delay_pattern": "0-1-2"}, "delay_pattern"),
        ({"delay_pattern": "0-a"}, "delay_pattern"),
        ({"group_size": 0}, "group_size"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"hidden_size": "wide"}, "model"),
    ],
)
def test_configs_that_are_not_served(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(config_json() | changed, "config.json")
    assert refused.value.field == field


def test_a_checkpoint_without_its_audio_tokenizer(tiny_dir: Path, tmp_path: Path) -> None:
    for path in tiny_dir.iterdir():
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(ConfigError, match="put the checkpoint MiMo-Audio-Tokenizer into the folder 'audio_tokenizer'"):
        read_codec(tmp_path, read_config(tmp_path))
    with pytest.raises(ConfigError, match="audio_tokenizer"):
        RecordingEncoder(LoadContext(tmp_path, "encoder", torch.device("cpu"), torch.float32))
