"""Qwen3-TTS behind OpenAI's speech endpoint, as the official client uses it: the audio is that of the package
`qwen-tts`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import load_file
from server_process import Served, served, tiny
from websockets.sync.client import connect

GOLDEN = Path(__file__).parents[3] / "models" / "speech" / "qwen3_tts" / "golden"
EVERY = 7
"""Of the samples, one is recorded."""
CASES = {case["name"]: case for case in json.loads((GOLDEN / "cases.json").read_text())}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint = tiny(tmp_path_factory.mktemp("qwen3-tts") / "tiny", "qwen3-tts")
    with served(checkpoint, "--log-level", "warning") as server:
        yield server


def say(client: openai.OpenAI, case: dict[str, Any], **changes: Any) -> bytes:
    given = case["given"]
    more = {"sampling": {"talker": {"temperature": 0, "max_tokens": case["max_tokens"]}}}
    if "language" in given:
        more["language"] = given["language"]
    asked = {"model": "tiny", "voice": given["speaker"].title(), "input": given["text"], "response_format": "pcm"}
    if "instruct" in given:
        asked["instructions"] = given["instruct"]
    return client.audio.speech.create(**{**asked, **changes}, extra_body=more).content


@pytest.mark.parametrize("name", ["plain", "dialect", "instructed", "cut"])
def test_the_audio_is_the_packages(client: openai.OpenAI, name: str) -> None:
    samples = np.frombuffer(say(client, CASES[name]), "<i2") / 32768
    expected = load_file(GOLDEN / "golden.safetensors")[f"{name}.samples"]
    assert len(samples[::EVERY]) == len(expected)
    assert float(np.abs(samples[::EVERY] - expected).max()) < 2e-4


def test_a_text_that_is_still_being_written(server: Served) -> None:
    """It is said by one generation, as the package says a text that is not there yet."""
    case = CASES["arriving"]
    limits = {"talker": {"temperature": 0, "max_tokens": case["max_tokens"]}}
    asked = {"voice": case["given"]["speaker"].title(), "response_format": "pcm", "sampling": json.dumps(limits)}
    letters = (letter.encode() for letter in case["given"]["text"])
    with server.client() as http:
        answer = http.post("/v1/audio/speech", params=asked, content=letters, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 200, answer.text
    samples = np.frombuffer(answer.content, "<i2") / 32768
    expected = load_file(GOLDEN / "golden.safetensors")["arriving.samples"]
    assert len(samples[::EVERY]) == len(expected)
    assert float(np.abs(samples[::EVERY] - expected).max()) < 2e-4


def test_the_same_over_a_websocket(server: Served) -> None:
    """Letter by letter: the audio of the body, without a gap, as one sentence."""
    case = CASES["arriving"]
    config = {
        "type": "session.config",
        "voice": case["given"]["speaker"].title(),
        "response_format": "pcm",
        "stream_audio": True,
        "sampling": {"talker": {"temperature": 0, "max_tokens": case["max_tokens"]}},
    }
    letters = [{"type": "input.text", "text": letter} for letter in case["given"]["text"]]
    url = server.url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
    audio, starts = b"", 0
    with connect(url, max_size=None, open_timeout=120, proxy=None) as socket:
        for message in (config, *letters, {"type": "input.done"}):
            socket.send(json.dumps(message))
        while True:
            message = socket.recv(timeout=240)
            if isinstance(message, bytes):
                audio += message
                continue
            kind = json.loads(message)["type"]
            assert kind != "error", message
            starts += kind == "audio.start"
            if kind == "session.done":
                break
    samples = np.frombuffer(audio, "<i2") / 32768
    expected = load_file(GOLDEN / "golden.safetensors")["arriving.samples"]
    assert starts == 1
    assert len(samples[::EVERY]) == len(expected)
    assert float(np.abs(samples[::EVERY] - expected).max()) < 2e-4


def test_other_voices_and_languages_are_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="speaks with: Vivian, Ryan, Dylan"):
        say(client, CASES["plain"], voice="alloy")
    with pytest.raises(openai.BadRequestError, match="one of auto, english"):
        say(client, {**CASES["plain"], "given": {**CASES["plain"]["given"], "language": "Klingon"}})
