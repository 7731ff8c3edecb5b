"""Pocket TTS behind OpenAI's speech endpoint, as the official client uses it: the audio is the library's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from server_process import Served, served, tiny

from segue.models.speech.pocket_tts.reference import Reference

TEXT = "Hello there"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("pocket-tts") / "tiny", "pocket-tts")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Served]:
    with served(checkpoint, "--log-level", "warning") as server:
        yield server


def test_the_audio_is_the_librarys(client: openai.OpenAI, checkpoint: Path) -> None:
    more = {"sampling": {"backbone": {"temperature": 0}}}
    data = client.audio.speech.create(
        model="tiny", input=TEXT, response_format="pcm", voice="marius", extra_body=more
    ).content
    said = np.frombuffer(data, "<i2") / 32768
    theirs = Reference(checkpoint).spoken(TEXT, "marius")[1].numpy()
    assert said.shape == theirs.shape
    assert float(np.abs(said - theirs).max()) < 2e-4


def test_voices_are_the_checkpoints(client: openai.OpenAI) -> None:
    answer = httpx.get(f"{str(client.base_url).rstrip('/')}/audio/voices", headers=client.auth_headers)
    assert "alba" in answer.text
    assert "marius" in answer.text
    with pytest.raises(openai.BadRequestError, match="speaks with: alba, marius"):
        client.audio.speech.create(model="tiny", input=TEXT, voice="alloy")
    with pytest.raises(openai.BadRequestError, match="this model takes none"):
        client.audio.speech.create(model="tiny", input=TEXT, voice="alba", instructions="Whisper.")
