"""CSM behind OpenAI's speech endpoint, as the official client uses it: the audio is the library's."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from server_process import ASSETS, Served, served, tiny

from segue.messages.request import MediaPart, Message, Part, Request, TextPart
from segue.models.shared.reference import Library
from segue.models.speech.csm.reference import Reference, load

ROWS = 60
TEXT = "Hello there"
WORDS = "Front, centre."
pytestmark = pytest.mark.nightly  # test_server_pocket_tts and test_server_qwen3_tts run every time


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("csm") / "tiny", "csm")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Served]:
    with served(checkpoint, "--log-level", "warning", "--allow-voice-cloning") as server:
        yield server


@pytest.fixture(scope="module")
def library(checkpoint: Path) -> Reference:
    return load(Library(checkpoint, "cpu", torch.float32))


def say(client: openai.OpenAI, text: str, more: dict[str, Any], **changes: Any) -> np.ndarray:
    sampling = {"backbone": {"temperature": 0, "max_tokens": ROWS}}
    asked = {"model": "tiny", "input": text, "response_format": "pcm", "voice": "1", **changes}
    data = client.audio.speech.create(**asked, extra_body={"sampling": sampling, **more}).content
    return np.frombuffer(data, "<i2") / 32768


def expected(library: Reference, *messages: Message, voice: str | None = None) -> np.ndarray:
    """The audio of the library's own greedy utterance."""
    return library.spoken(Request(request_id="r", messages=list(messages), voice=voice), ROWS)


def test_the_audio_is_the_librarys(client: openai.OpenAI, library: Reference) -> None:
    said = say(client, TEXT, {})
    theirs = expected(library, Message("user", [TextPart(TEXT)]), voice="1")
    assert said.shape == theirs.shape
    assert float(np.abs(said - theirs).max()) < 2e-4


def test_in_the_voice_of_a_recording(client: openai.OpenAI, library: Reference) -> None:
    recording = (ASSETS / "speech.wav").read_bytes()
    more = {"ref_audio": f"data:audio/wav;base64,{base64.b64encode(recording).decode()}", "ref_text": WORDS}
    said = say(client, TEXT, more, voice=openai.omit)
    heard: list[Part] = [TextPart(WORDS), MediaPart("audio", recording)]
    theirs = expected(library, Message("user", heard), Message("user", [TextPart(TEXT)]))
    assert said.shape == theirs.shape
    assert float(np.abs(said - theirs).max()) < 2e-4


def test_what_is_not_known_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="speaks with: 0, 1, 2"):
        say(client, TEXT, {}, voice="alloy")
    with pytest.raises(openai.BadRequestError, match="this model takes none"):
        say(client, TEXT, {}, instructions="Whisper.")
