"""Higgs Audio v2 behind OpenAI's speech endpoint, as the official client uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from server_process import Served, served, tiny

pytestmark = pytest.mark.nightly  # test_server_pocket_tts and test_server_qwen3_tts run every time


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint: Path = tiny(tmp_path_factory.mktemp("higgs") / "tiny", "higgs-audio-v2")
    with served(checkpoint, "--log-level", "warning", "--allow-voice-cloning") as server:
        yield server


def say(client: openai.OpenAI, text: str, more: dict[str, Any] | None = None, **changes: Any) -> np.ndarray:
    sampling = {"llm": {"temperature": 0, "max_tokens": 60}}
    asked = {"model": "tiny", "input": text, "response_format": "pcm", "voice": openai.omit, **changes}
    data = client.audio.speech.create(**asked, extra_body={"sampling": sampling, **(more or {})}).content
    return np.frombuffer(data, "<i2") / 32768


def test_it_says_a_text_in_a_scene(client: openai.OpenAI) -> None:
    said, described = say(client, "Hello there"), say(client, "Hello there", instructions="A large hall.")
    assert len(said) % 960 == len(described) % 960 == 0
    assert 0.02 < np.sqrt(np.mean(said**2)) < 0.5
    assert said.tobytes() != described.tobytes()


def test_what_is_not_known_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="voice is 'alloy', which is not known; this model has no voices"):
        say(client, "Hello there", voice="alloy")
    with pytest.raises(openai.BadRequestError, match="this model clones no voices"):
        say(client, "Hello there", {"ref_audio": "data:audio/wav;base64,UklGRg==", "ref_text": "Yes."})
