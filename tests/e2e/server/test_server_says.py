"""An omni model behind OpenAI's audio endpoints, as the official client uses them: it says a text, and writes down a
recording."""

from __future__ import annotations

import io
import json
import socket
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import av
import numpy as np
import openai
import pytest
from server_process import Served

TEXT = "The sea is calm today, and the hills are green."
GREEDY: dict[str, Any] = {"seed": 4, "sampling": {"talker": {"temperature": 0, "max_tokens": 100}}}


@pytest.fixture
def server(plain_server: Served) -> Served:
    return plain_server


def say(client: openai.OpenAI, text: str = TEXT, **changes: Any) -> bytes:
    given = {"model": "tiny", "voice": "Ethan", "response_format": "pcm", **changes}
    return client.audio.speech.create(input=text, extra_body=GREEDY, **given).content


def words(data: bytes) -> bytes:
    """The samples of a file, as 16-bit words."""
    with av.open(io.BytesIO(data)) as container:
        resampler = av.AudioResampler(format="s16", layout="mono", rate=24000)
        frames = [*container.decode(container.streams.audio[0]), None]
        return b"".join(piece.to_ndarray().tobytes() for frame in frames for piece in resampler.resample(frame))


def test_it_says_the_text_in_the_voice(client: openai.OpenAI) -> None:
    said = say(client)
    samples = np.frombuffer(said, "<i2") / 32768
    assert 0.02 < float(np.sqrt(np.mean(samples**2))) < 0.5
    assert say(client) == said
    assert say(client, voice={"id": "Ethan"}) == said
    assert say(client, voice="Chelsie") != said
    assert say(client, TEXT.replace("calm", "wild")) != said
    for form in ("wav", "flac"):
        assert words(say(client, response_format=form)) == said


def test_faster_is_shorter(client: openai.OpenAI) -> None:
    assert len(say(client, speed=2.0)) == pytest.approx(len(say(client)) / 2, rel=0.1)


def test_the_first_pieces_come_first(client: openai.OpenAI) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="tiny", voice="Ethan", input=TEXT, response_format="pcm", extra_body=GREEDY
    ) as answer:
        pieces = list(answer.iter_bytes())
    assert len(pieces) > 1
    assert b"".join(pieces) == say(client)


def test_a_text_is_said_while_it_arrives(client: openai.OpenAI, server: Served) -> None:
    """Each sentence as in a request of its own; the second one is sent when the first one's audio is there."""
    first, second = "The sea is calm today.", "The hills are green."
    expected = say(client, first), say(client, second)
    query = urlencode(
        {"voice": "Ethan", "response_format": "pcm", "seed": GREEDY["seed"], "sampling": json.dumps(GREEDY["sampling"])}
    )
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=120) as sock, HTTPResponse(sock) as answer:
        head = f"POST /v1/audio/speech?{query} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
        sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for letter in f"{first}\n\n":
            sock.sendall(f"1\r\n{letter}\r\n".encode())
        answer.begin()
        assert answer.status == 200
        said = answer.read(len(expected[0]))
        assert said == expected[0]
        sock.sendall(f"{len(second):x}\r\n{second}\r\n0\r\n\r\n".encode())
        assert answer.read() == expected[1]


def test_other_voices_are_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="speaks with: Chelsie, Ethan"):
        say(client, voice="alloy")
    with pytest.raises(openai.BadRequestError, match="this model takes none"):
        say(client, instructions="Whisper.")
    with pytest.raises(openai.BadRequestError, match=r"input: the text holds '<\|AUDIO\|>'"):
        say(client, "What is <|AUDIO|>?")


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_it_writes_down_a_recording(client: openai.OpenAI, assets: Path) -> None:
    """The tiny model's words mean nothing; those of another question are others."""
    recording = assets / "speech.wav"
    limits: dict[str, Any] = {"temperature": 0.0, "model": "tiny"}
    heard = client.audio.transcriptions.create(file=recording, **limits)
    assert heard.text
    assert heard.usage is not None
    assert heard.usage.to_dict()["input_token_details"]["audio_tokens"] > 10
    events = list(client.audio.transcriptions.create(file=recording, stream=True, **limits))
    assert events[-1].text == heard.text
    assert client.audio.translations.create(file=recording, **limits).text != heard.text
    with pytest.raises(openai.BadRequestError, match=r"prompt: the text holds '<\|IMAGE\|>'"):
        client.audio.transcriptions.create(file=recording, prompt="<|IMAGE|>", **limits)
