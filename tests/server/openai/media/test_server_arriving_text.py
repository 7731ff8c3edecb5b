"""`/v1/audio/speech` with a text as the body: it is said while it arrives, by sentences or by words, within limits."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import AsyncGenerator, Iterator
from http.client import HTTPResponse
from typing import Any

import httpx
import numpy as np
import pytest
from fake_service import RATE, FakeService, Gate, Live, finished, live

from segue.messages.deltas import AudioDelta, Delta
from segue.messages.errors import StageFailed
from segue.messages.request import Request, TextPart
from segue.messages.speech import TextToSpeech
from segue.orchestrator.spoken.passages import MOST_SENTENCES
from segue.server.openai.audio.arriving_text import MOST_STREAMED
from segue.server.settings import ServerSettings
from segue.server.tenants.tenants import Tenant, digest

PATH = "/v1/audio/speech"
TEXT = {"Content-Type": "text/plain"}
THREE = "One is here. Two is there! Three has 3.5 metres."


def text_of(request: Request) -> str:
    part = request.messages[0].content[-1]
    assert isinstance(part, TextPart)
    return part.text


def samples(text: str) -> np.ndarray:
    """The fake model's speech: a second, another one for each text."""
    return (np.random.default_rng(list(text.encode())).normal(size=RATE) / 10).astype(np.float32)


def pcm(*texts: str) -> bytes:
    return b"".join(np.rint(samples(text) * 32767).astype("<i2").tobytes() for text in texts)


async def speak(request: Request) -> AsyncGenerator[Delta]:
    whole = samples(text_of(request))
    for part in np.split(whole, 4):
        yield AudioDelta("vocoder", part.tobytes(), RATE)
    yield finished()


def service(script: Any = speak) -> FakeService:
    made = FakeService(script)
    made.card.says = TextToSpeech()
    return made


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    with live(service()) as server:
        yield server


@pytest.fixture(autouse=True)
def scripted(server: Live) -> None:
    server.service.script = speak


class Upload:
    """A client that sends its body in pieces and reads the answer meanwhile."""

    def __init__(self, server: Live, query: str = "?response_format=pcm&seed=3") -> None:
        self.sock = socket.create_connection(("127.0.0.1", server.port), timeout=120)
        head = f"POST {PATH}{query} HTTP/1.1\r\nHost: localhost\r\n"
        self.sock.sendall(f"{head}Content-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        self.answer = HTTPResponse(self.sock)

    def send(self, text: str) -> None:
        """An empty text ends the body."""
        data = text.encode()
        self.sock.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *error: object) -> None:
        self.answer.close()
        self.sock.close()


def test_it_speaks_before_the_text_is_complete(server: Live) -> None:
    with Upload(server) as upload:
        for letter in "One is here. T":
            upload.send(letter)
        upload.answer.begin()
        said = upload.answer.read(len(pcm("One is here.")))
        upload.send("wo is there! Three has 3.")
        said += upload.answer.read(len(pcm("Two is there!")) // 2)
        upload.send("5 metres.")
        upload.send("")
        assert said + upload.answer.read() == pcm("One is here.", "Two is there!", "Three has 3.5 metres.")
        assert upload.answer.getheader("content-type") == "audio/pcm"
    assert [(text_of(request), request.seed) for request in server.service.requests] == [
        ("One is here.", 3),
        ("Two is there!", 3),
        ("Three has 3.5 metres.", 3),
    ]
    assert len({request.request_id for request in server.service.requests}) == 3


def test_a_file_holds_all_sentences(http: httpx.Client, server: Live) -> None:
    asked = {"voice": "Ben", "response_format": "flac", "stream_format": "sse", "speed": "2", "priority": "1"}
    answer = http.post(PATH, content=THREE, params=asked, headers=TEXT)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data")]
    usage = {"input_tokens": 30, "output_tokens": 15, "total_tokens": 45}
    assert events[-1] == {"type": "speech.audio.done", "usage": usage}
    assert [(one.voice, one.priority) for one in server.service.requests] == [("Ben", 1)] * 3
    wav = http.post(PATH, content=THREE, params={"response_format": "wav"}, headers=TEXT).content
    assert wav[44:] == pcm("One is here.", "Two is there!", "Three has 3.5 metres.")


def goes_on(script: Any = speak) -> FakeService:
    made = service(script)
    made.card.says = TextToSpeech(appends=True)
    return made


def test_a_model_that_goes_on_gets_the_text_as_it_arrives() -> None:
    """One request; a word is said when the character after it has come."""
    with live(goes_on(), ServerSettings(drain_seconds=1)) as server, Upload(server) as upload:
        upload.send("  One is")
        upload.answer.begin()
        said = upload.answer.read(len(pcm("One")))
        upload.send(" here. T")
        said += upload.answer.read(len(pcm(" is here")))
        upload.send("wo")
        upload.send("")
        assert said + upload.answer.read() == pcm("One", " is here", ". Two")
        assert [text_of(request) for request in server.service.requests] == ["One"]


def test_a_long_text_that_goes_on_is_said_in_passages() -> None:
    sentence = "Words of a sentence. "
    with live(goes_on(), ServerSettings(drain_seconds=1)) as server:
        answer = httpx.post(
            f"{server.url}{PATH}", content=sentence * 250, params={"stream_format": "sse"}, headers=TEXT, timeout=120
        )
        assert answer.text.count("speech.audio.done") == 2  # the event's name and its data
        assert len(server.service.requests) == 6


def test_errors_of_a_text_that_goes_on() -> None:
    with live(goes_on(), ServerSettings(drain_seconds=1, stall_seconds=0.3)) as server:
        with Upload(server, "?response_format=pcm&stream_format=sse") as upload:
            upload.send("Hello ther")
            upload.answer.begin()
            events = upload.answer.read().decode()
            assert events.index("speech.audio.delta") < events.index("no more text arrived")
            assert "speech.audio.done" not in events
        assert server.service.cancelled.get(timeout=120) == server.service.requests[-1].request_id
        for content, status in (("", 400), (" ... \n\n!", 400), ("word " * (MOST_STREAMED // 4), 413)):
            answer = httpx.post(f"{server.url}{PATH}", content=content, headers=TEXT, timeout=120)
            assert answer.status_code == status


def test_the_next_sentence_is_made_meanwhile_and_no_more(server: Live, http: httpx.Client) -> None:
    """The first sentence ends when the second has begun; the third begins after that."""
    running: list[str] = []
    most: list[int] = []
    gate = Gate()

    async def script(request: Request) -> AsyncGenerator[Delta]:
        running.append(text := text_of(request))
        most.append(len(running))
        if text.startswith("One"):
            await gate.wait()
        elif text.startswith("Two"):
            gate.open()
        async for delta in speak(request):
            if not isinstance(delta, AudioDelta):
                running.remove(text)
            yield delta

    server.service.script = script
    answer = http.post(PATH, content=f"{THREE} Four. Five.", params={"response_format": "pcm"}, headers=TEXT)
    assert answer.content == pcm("One is here.", "Two is there!", "Three has 3.5 metres.", "Four.", "Five.")
    assert max(most) == 2


@pytest.mark.parametrize(
    ("query", "headers", "content", "status", "said"),
    [
        ({"vioce": "Ben"}, {}, b"Hello.", 400, "did you mean 'voice'"),
        ({"voice": "Bob"}, {}, b"Hello.", 400, "speaks with: Anna, Ben"),
        ({"speed": "fast"}, {}, b"Hello.", 400, "speed is 'fast'"),
        ({"model": "tts-1"}, {}, b"Hello.", 404, "not served here"),
        ({"input": "Hello."}, {}, b"Hello.", 400, "the body is the text"),
        ({}, {}, b"", 400, "at least one word"),
        ({}, {}, b" ... \n\n!", 400, "at least one word"),
        ({}, {}, b"H\xe4llo.", 400, "not UTF-8"),
        ({}, {"Content-Type": "text/plain; charset=latin-1"}, b"Hello.", 415, "must be utf-8"),
        ({}, {"Content-Encoding": "gzip"}, b"Hello.", 415, "send the body as it is"),
        ({}, {}, b"word " * (MOST_STREAMED // 4), 413, f"more than {MOST_STREAMED} characters"),
        ({}, {}, b"Ab cd. " * (MOST_SENTENCES + 1), 413, f"more than {MOST_SENTENCES} sentences"),
    ],
)
def test_mistakes_are_named(
    http: httpx.Client, query: dict[str, str], headers: dict[str, str], content: bytes, status: int, said: str
) -> None:
    answer = http.post(PATH, content=content, params=query, headers={**TEXT, **headers})
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text


def test_a_sentence_that_fails_breaks_off(server: Live, http: httpx.Client) -> None:
    async def script(request: Request) -> AsyncGenerator[Delta]:
        if text_of(request).startswith("Two"):
            raise StageFailed("the vocoder died", stage="vocoder")
        async for delta in speak(request):
            yield delta

    server.service.script = script
    with pytest.raises(httpx.RemoteProtocolError):
        http.post(PATH, content=THREE, params={"response_format": "pcm"}, headers=TEXT)
    answer = http.post(PATH, content=THREE, params={"stream_format": "sse"}, headers=TEXT)
    assert "event: error" in answer.text
    assert "the vocoder died" in answer.text


def test_a_client_that_leaves_cancels_every_sentence() -> None:
    gate, both = Gate(), Gate()

    async def script(request: Request) -> AsyncGenerator[Delta]:
        if text_of(request).startswith("Two"):
            both.open()
        else:
            await both.wait()
        yield AudioDelta("vocoder", samples("x").tobytes(), RATE)
        await gate.wait()
        yield finished()

    made = service(script)
    with live(made) as server:
        with Upload(server) as upload:
            upload.send(f"{THREE} Fo")
            upload.answer.begin()
            assert upload.answer.read(10)
        left = {made.cancelled.get(timeout=120) for _ in range(2)}
    assert left == {request.request_id for request in made.requests}


def test_text_that_stops_coming_ends_the_request() -> None:
    with live(service(), ServerSettings(drain_seconds=1, stall_seconds=0.3)) as server:
        with Upload(server) as upload:
            upload.send("Hello")
            upload.answer.begin()
            error = json.loads(upload.answer.read())["error"]
            assert (upload.answer.status, error["code"]) == (408, "request_timeout")
            assert "no more text arrived for 0.3 seconds" in error["message"]
        with Upload(server, "?response_format=pcm&stream_format=sse") as upload:
            upload.send("Hello.\n\n")
            upload.answer.begin()
            events = upload.answer.read().decode()
            assert events.index("speech.audio.delta") < events.index("no more text arrived")
            assert "speech.audio.done" not in events


def test_a_text_may_take_longer_than_other_bodies() -> None:
    """A body has `upload_grace`, and then a rate, only where nothing is answered until it is there."""
    settings = ServerSettings(drain_seconds=1, upload_grace=0.1, upload_seconds=60)
    with live(service(), settings) as server, Upload(server) as upload:
        upload.send("Hello.\n\n")
        upload.answer.begin()
        said = upload.answer.read(len(pcm("Hello.")))
        assert select.select([upload.sock], [], [], 0.5)[0] == []
        upload.send("Bye.")
        upload.send("")
        assert said + upload.answer.read() == pcm("Hello.", "Bye.")


def test_a_text_needs_the_key_and_no_other_sites_page_sends_it() -> None:
    """A browser sends text/plain to another site without asking first: `Origin` and `Host` keep it out."""
    made = service()
    one_at_a_time = Tenant(name="ann", digests=(digest("hers"),), max_requests=1)
    settings = ServerSettings(drain_seconds=1, api_key="secret", tenants=(one_at_a_time,))
    key = {**TEXT, "Authorization": "Bearer secret"}
    with live(made, settings) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        for headers, status in (
            (TEXT, 401),
            ({**TEXT, "Authorization": "Bearer wrong"}, 401),
            ({**key, "Origin": "https://other.example"}, 403),
            ({**key, "Origin": "null"}, 403),
            ({**key, "Host": "rebound.example"}, 421),
        ):
            assert http.post(PATH, content=THREE, headers=headers).status_code == status, headers
        assert not made.requests
        hers = {**TEXT, "Authorization": "Bearer hers"}
        assert http.post(PATH, content=THREE, headers=hers).status_code == 200
        assert {request.tenant for request in made.requests} == {"ann"}
