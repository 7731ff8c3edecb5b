"""A recording over HTTP is written down as transformers writes it down, streamed and not, in one window and in several,
by a server that lost its decoder meanwhile, too."""

from __future__ import annotations

import io
import os
import signal
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from server_process import Served, segue, served, tiny

from segue.media.audio import decode_audio
from segue.media.limits import MediaLimits
from segue.messages.request import MediaPart
from segue.models.shared.library import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer

MODEL = "tiny"
RATE = 16000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("speech") / "whisper", "whisper")


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = tmp_path_factory.mktemp("limits") / "deployment.yaml"
    config.write_text("defaults: {dtype: float32}\nlimits: {max_audio_seconds: 50}\n")
    with served(checkpoint, "--config", str(config), "--log-level", "warning") as server:
        yield server


@pytest.fixture(scope="module")
def speech(assets: Path) -> bytes:
    return (assets / "speech.wav").read_bytes()


@pytest.fixture(scope="module")
def samples(speech: bytes) -> Any:
    return decode_audio(MediaPart("audio", speech), RATE, MediaLimits())


def wav(samples: Any) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def text_of(checkpoint: Path, samples: Any, **asked: Any) -> str:
    """By `generate`; `return_timestamps`: of the long form."""
    model = AutoModelForSpeechSeq2Seq.from_pretrained(checkpoint, dtype=torch.float32).eval()
    long = {"truncation": False, "padding": "longest"} if asked.get("return_timestamps") else {}
    made = AutoFeatureExtractor.from_pretrained(checkpoint)(
        samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **long
    )
    [ids] = model.generate(**made, **asked).tolist()
    text: str = AutoTokenizer.from_pretrained(checkpoint).decode(ids, skip_special_tokens=True)
    return text.strip()


def test_a_recording(client: openai.OpenAI, checkpoint: Path, speech: bytes, samples: Any) -> None:
    wanted = text_of(checkpoint, samples, task="transcribe")
    answer = client.audio.transcriptions.create(model=MODEL, file=("speech.wav", speech))
    assert answer.text == wanted
    events = client.audio.transcriptions.create(model=MODEL, file=("speech.wav", speech), stream=True)
    assert "".join(event.delta for event in events if event.type == "transcript.text.delta").strip() == wanted


def test_windows_and_a_lost_decoder(client: openai.OpenAI, server: Served, checkpoint: Path, samples: Any) -> None:
    long = np.concatenate([samples, samples[::-1]] * 12)[: 33 * RATE]
    file = wav(long)
    heard = decode_audio(MediaPart("audio", file), RATE, MediaLimits())
    wanted = text_of(checkpoint, heard, task="transcribe", language="de", return_timestamps=True)
    for lost in (False, True):
        events = client.audio.transcriptions.create(model=MODEL, file=("long.wav", file), language="de", stream=True)
        if lost:
            os.kill(server.pid("llm"), signal.SIGKILL)
        texts = [event.text for event in events if event.type == "transcript.text.done"]
        assert texts == [wanted]


def test_files_that_are_wrong(client: openai.OpenAI, speech: bytes) -> None:
    for data, said in ((b"RIFF and nothing", "file"), (wav(np.zeros(51 * RATE)), "max_audio_seconds")):
        with pytest.raises(openai.APIStatusError, match=said) as refused:
            client.audio.transcriptions.create(model=MODEL, file=("speech.wav", data))
        assert refused.value.status_code in (400, 413)
        assert refused.value.param == "file"


@pytest.mark.nightly
def test_the_command_line_prints_the_text(checkpoint: Path, assets: Path, samples: Any) -> None:
    done = segue("generate", str(checkpoint), "--audio", str(assets / "speech.wav"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == text_of(checkpoint, samples, task="transcribe")
