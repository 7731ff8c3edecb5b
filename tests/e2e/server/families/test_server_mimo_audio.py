"""MiMo-Audio behind OpenAI's endpoints, as the official client uses them: text to speech, speech to text, speech to
speech. The answers are those of the published code."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import load_file
from server_process import Served, served, tiny

from segue.media.audio import decode_audio
from segue.media.limits import MediaLimits
from segue.messages.request import MediaPart
from segue.models.shared.library import AutoTokenizer

GOLDEN = Path(__file__).parents[3] / "models" / "speech" / "mimo_audio" / "golden" / "golden.safetensors"
EVERY = 61
"""Of the samples, one is recorded."""
RATE = 24000
GREEDY: dict[str, Any] = {"llm": {"temperature": 0, "max_tokens": 80}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("mimo-audio") / "tiny", "mimo-audio")


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    deployment = tmp_path_factory.mktemp("mimo-audio") / "deployment.yaml"
    deployment.write_text("stages: {llm: {options: {audio_temperature: 0}}}\n")
    with served(checkpoint, "--config", str(deployment), "--log-level", "warning") as server:
        yield server


def recording(samples: int) -> str:
    """That of `make_golden.py`, as a WAV file of floats in base64."""
    rng, t = np.random.default_rng(samples), np.arange(samples) / RATE
    tones = rng.uniform((100, 0), (6000, 6), (3, -(-samples // 2400), 2)).repeat(2400, axis=1)[:, :samples]
    wave = np.sin(2 * np.pi * tones[..., 0] * t + tones[..., 1]).sum(axis=0)
    data = (0.1 * wave + 0.01 * rng.standard_normal(samples)).astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, 1, RATE, 4 * RATE, 4, 32)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return base64.b64encode(b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks).decode()


def ask(client: openai.OpenAI, *parts: Any, **more: Any) -> Any:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "input_audio", "input_audio": {"data": recording(part), "format": "wav"}}
        for part in parts
    ]
    messages: Any = [{"role": "user", "content": content}]
    [choice] = client.chat.completions.create(
        model="tiny", messages=messages, extra_body={"sampling": GREEDY}, **more
    ).choices
    return choice.message


def text_of(checkpoint: Path, name: str) -> str:
    ids = load_file(GOLDEN)[f"{name}.rows"][:, 0]
    return str(AutoTokenizer.from_pretrained(checkpoint).decode(ids, skip_special_tokens=True))


def check(samples: np.ndarray, name: str) -> None:
    expected = load_file(GOLDEN)[f"{name}.samples"]
    assert len(samples[::EVERY]) == len(expected)
    assert float(np.abs(samples[::EVERY] - expected).max()) < 2e-4


def test_text_to_speech(client: openai.OpenAI) -> None:
    said = client.audio.speech.create(
        model="tiny",
        voice=openai.omit,
        input="Where are you going?",
        instructions="Say it slowly.",
        response_format="pcm",
        extra_body={"sampling": GREEDY},
    )
    check(np.frombuffer(said.content, "<i2") / 32768, "instructed")


def test_speech_to_text(client: openai.OpenAI, checkpoint: Path) -> None:
    assert ask(client, 41234, "What is it?").content == text_of(checkpoint, "understood") != ""
    assert ask(client, 11111).content == text_of(checkpoint, "answered in text") != ""


def test_speech_to_speech(client: openai.OpenAI, checkpoint: Path) -> None:
    audio: Any = {"format": "wav"}
    message = ask(client, 30000, modalities=["text", "audio"], audio=audio)
    assert message.audio.transcript == text_of(checkpoint, "answered")
    wave = MediaPart("audio", io.BytesIO(base64.b64decode(message.audio.data)).getvalue())
    check(decode_audio(wave, RATE, MediaLimits()), "answered")


def test_what_is_not_known_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="this model has no voices"):
        client.audio.speech.create(model="tiny", voice="alloy", input="Hello")
    with pytest.raises(openai.BadRequestError, match="must have at least 481"):
        ask(client, 400)
