"""`/v1/audio/speech/stream`: vllm-omni's websocket, with a real client, within the limits of other requests."""

from __future__ import annotations

import asyncio
import io
import json
import wave
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest
from fake_service import RATE, FakeService, Gate, Live, finished, live
from starlette.types import Message
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from segue.messages.deltas import AudioDelta, Delta
from segue.messages.errors import StageFailed
from segue.messages.request import Request, TextPart
from segue.messages.speech import TextToSpeech
from segue.server.app import create_app
from segue.server.http.intake import MESSAGE_BYTES
from segue.server.openai.audio.arriving_text import MOST_STREAMED
from segue.server.openai.audio.speech_request import MOST_CHARACTERS
from segue.server.settings import ServerSettings
from segue.server.tenants.tenants import Tenant, digest

PATH = "/v1/audio/speech/stream"
PCM = {"type": "session.config", "response_format": "pcm", "stream_audio": True}
DONE = {"type": "input.done"}


def text_of(request: Request) -> str:
    part = request.messages[0].content[-1]
    assert isinstance(part, TextPart)
    return part.text


def samples(text: str) -> np.ndarray:
    """The fake model's speech: a second, another one for each text."""
    return (np.random.default_rng(list(text.encode())).normal(size=RATE) / 10).astype(np.float32)


def pcm(text: str) -> bytes:
    return np.rint(samples(text) * 32767).astype("<i2").tobytes()


async def speak(request: Request) -> AsyncGenerator[Delta]:
    text = text_of(request)
    if text.startswith("Fail"):
        raise StageFailed("the vocoder died", stage="vocoder")
    for part in np.split(samples(text), 4):
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


def opened(server: Live, **headers: str) -> ClientConnection:
    url = f"ws://127.0.0.1:{server.port}{PATH}"
    return connect(url, additional_headers=headers, max_size=None, open_timeout=120, close_timeout=1, proxy=None)


def send(client: ClientConnection, *messages: object) -> None:
    """A string is a piece of text."""
    for message in messages:
        client.send(json.dumps({"type": "input.text", "text": message} if isinstance(message, str) else message))


def received(client: ClientConnection) -> Any:
    message = client.recv(timeout=120)
    return json.loads(message) if isinstance(message, str) else message


def up_to(client: ClientConnection, kind: str) -> list[Any]:
    """The messages up to one of this type; pieces of audio that follow each other are joined."""
    found: list[Any] = []
    while True:
        message = received(client)
        if isinstance(message, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += message
        else:
            found.append(message)
        if isinstance(message, dict) and message["type"] == kind:
            return found


def ended(client: ClientConnection) -> tuple[dict[str, Any], int]:
    """(the last message, close code)."""
    messages: list[Any] = [{}]
    with suppress(ConnectionClosed):
        while True:
            messages.append(received(client))
    assert client.protocol.close_code is not None
    return messages[-1], client.protocol.close_code


def start(utterance: int, sentence: int, text: str) -> dict[str, Any]:
    where = {"utterance_index": utterance, "sentence_index": sentence}
    return {"type": "audio.start", **where, "sentence_text": text, "format": "pcm", "sample_rate": RATE, "channels": 1}


def done(utterance: int, sentence: int, text: str) -> dict[str, Any]:
    where = {"utterance_index": utterance, "sentence_index": sentence}
    return {"type": "audio.done", **where, "total_bytes": len(pcm(text)), "error": False}


def test_it_says_sentences_while_texts_are_written(server: Live) -> None:
    one, two, three = "One is here.", "Two is there!", "Three has 3.5 metres."
    with opened(server) as client:
        send(client, {**PCM, "voice": "Ben", "seed": 3}, *"One is here. T")
        assert up_to(client, "audio.done") == [start(0, 0, one), pcm(one), done(0, 0, one)]
        send(client, "wo is there! Three has 3.", "5 metres.", DONE)
        assert up_to(client, "session.done") == [
            *(start(0, 1, two), pcm(two), done(0, 1, two)),
            *(start(0, 2, three), pcm(three), done(0, 2, three)),
            {"type": "session.done", "utterance_index": 0, "total_sentences": 3},
        ]
        # the connection goes on: another text, whole, in a file
        send(client, {"type": "session.config", "split_granularity": "none"}, "One. ", "Two.", DONE)
        first, file, last, _ = up_to(client, "session.done")
        assert (first["utterance_index"], first["sentence_text"], first["format"]) == (1, "One. Two.", "wav")
        assert last["total_bytes"] == len(file)
        with wave.open(io.BytesIO(file)) as opened_file:
            assert opened_file.getframerate() == RATE
        assert file[44:] == pcm("One. Two.")
        send(client, DONE, {"type": "session.close"})
        assert ended(client) == ({"type": "session.done", "utterance_index": 2, "total_sentences": 0}, 1000)
    asked = server.service.requests
    assert [(text_of(request), request.seed, request.voice) for request in asked[:3]] == [
        (text, 3, "Ben") for text in (one, two, three)
    ]
    assert len({request.request_id for request in asked}) == 4


def heard(client: ClientConnection, expected: bytes) -> None:
    """The next pieces of audio are these."""
    audio = b""
    while len(audio) < len(expected):
        audio += received(client)
    assert audio == expected


def goes_on(script: Any = speak) -> FakeService:
    made = service(script)
    made.card.says = TextToSpeech(appends=True)
    return made


def test_a_model_that_goes_on_gets_the_text_as_it_arrives() -> None:
    """One request per text; a word is said when the character after it has come."""
    with live(goes_on(), ServerSettings(drain_seconds=1)) as server, opened(server) as client:
        send(client, PCM, "  One is")
        assert received(client) == start(0, 0, "One")
        heard(client, pcm("One"))
        send(client, " here. T")
        heard(client, pcm(" is here"))
        send(client, "wo", DONE)
        heard(client, pcm(". Two"))
        *_, last, end = up_to(client, "session.done")
        assert last == {**done(0, 0, "One"), "total_bytes": 3 * len(pcm("One"))}
        assert end == {"type": "session.done", "utterance_index": 0, "total_sentences": 1}
        send(client, {**PCM, "split_granularity": "sentence"}, "One. Two.", DONE)
        said = [message for message in up_to(client, "session.done") if not isinstance(message, bytes)]
        assert [one["sentence_text"] for one in said if one["type"] == "audio.start"] == ["One.", "Two."]
        assert [text_of(request) for request in server.service.requests] == ["One", "One.", "Two."]
        send(client, PCM, "Words of a sentence. " * 60, DONE)
        assert up_to(client, "session.done")[-1]["total_sentences"] == 2, "passages"
        send(client, PCM, "Three is her")
        send(client, {"type": "session.close"})
        assert up_to(client, "audio.done")[1] == pcm("Three is")
        assert ended(client)[1] == 1000


def test_a_passage_that_fails_is_said_no_further() -> None:
    with live(goes_on(), ServerSettings(drain_seconds=1)) as server, opened(server) as client:
        send(client, PCM, "Fail is")
        *_, error, last = up_to(client, "audio.done")
        assert (error["type"], last["error"]) == ("error", True)
        send(client, " here. " * 20, DONE, "One is here", DONE)
        assert up_to(client, "session.done")[-1]["utterance_index"] == 0
        *_, last, end = up_to(client, "session.done")
        assert (last["error"], end["utterance_index"]) == (False, 1)


def test_a_sentence_that_fails_or_a_wrong_message_ends_no_session(server: Live) -> None:
    with opened(server) as client:
        send(client, PCM, "Fail now.\n\nOne.", DONE)
        _, error, last, *rest = up_to(client, "session.done")
        assert error["error"]["stage"] == "vocoder"
        assert error["message"] == error["error"]["message"] == "the vocoder died"
        assert (last["error"], last["total_bytes"]) == (True, 0)
        assert rest[:3] == [start(0, 1, "One."), pcm("One."), done(0, 1, "One.")]
        for message, field in (
            ({"type": "input.txt"}, "type"),
            ({"type": "input.text", "text": 5}, "text"),
            ({**PCM, "voice": "Bob"}, "voice"),
            ({**PCM, "vioce": "Ben"}, "vioce"),
            ({**PCM, "word_timestamps": True}, "word_timestamps"),
            ({**PCM, "split_granularity": "clause"}, "split_granularity"),
            ([], None),
        ):
            send(client, message)
            error = received(client)
            assert (error["type"], error["error"]["param"]) == ("error", field)
        send(client, "Two.", DONE)
        assert up_to(client, "session.done")[:2] == [start(1, 0, "Two."), pcm("Two.")]


@pytest.mark.parametrize(
    ("messages", "code", "said"),
    [
        (["Hello."], 1008, "session.config in the first message"),
        ([{**PCM, "model": "tts-1"}], 1008, "not served here"),
        ([PCM, "word " * (MOST_STREAMED // 5), "Bye. "], 1009, f"more than {MOST_STREAMED} characters"),
        ([{**PCM, "split_granularity": "none"}, "a" * (MOST_CHARACTERS + 1)], 1009, f"{MOST_CHARACTERS} characters"),
        ([PCM, *[DONE] * 1100], 1009, "wait to be spoken"),
    ],
)
def test_errors_that_end_the_session(server: Live, messages: list[object], code: int, said: str) -> None:
    gate = Gate()

    async def script(request: Request) -> AsyncGenerator[Delta]:
        await gate.wait()
        yield finished()

    server.service.script = script
    with opened(server) as client:
        if code == 1009:
            send(client, messages[0], "First.\n\n", DONE)
            messages = messages[1:]
        with suppress(ConnectionClosed):  # the server may be first
            send(client, *messages)
        last, closed = ended(client)
        assert (last["type"], closed) == ("error", code)
        assert said in last["message"]


def test_a_message_that_is_too_large_ends_it(server: Live) -> None:
    with opened(server) as client:
        client.send("x" * MESSAGE_BYTES)
        assert "not JSON" in ended(client)[0]["message"]
    with opened(server) as client:
        with suppress(ConnectionClosed):
            client.send("x" * (MESSAGE_BYTES + 1))
        last, code = ended(client)
        assert not last  # it was not read
        assert code in (1009, 1006)  # a reset may overtake the reason


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
        with opened(server) as client:
            send(client, PCM, "One. Two. Three. Fo")
            assert received(client)["sentence_text"] == "One."
            assert received(client)
        left = {made.cancelled.get(timeout=120) for _ in range(2)}
    assert left == {request.request_id for request in made.requests}


def test_clients_that_send_or_read_nothing_are_let_go() -> None:
    async def endless(request: Request) -> AsyncGenerator[Delta]:
        while text_of(request) == "Endless.":
            yield AudioDelta("vocoder", samples("x").tobytes(), RATE)
        async for delta in speak(request):
            yield delta

    made = service()
    with live(made, ServerSettings(drain_seconds=1, stall_seconds=0.5)) as server:
        for messages, said in (
            ([], "no message arrived for 0.5 seconds"),
            ([PCM, "Hello"], "no more text arrived for 0.5 seconds"),
            ([PCM, "Hello.", DONE], "no message arrived"),
        ):
            with opened(server) as client:
                send(client, *messages)
                last, code = ended(client)
                assert (last["error"]["code"], code) == ("request_timeout", 1008)
                assert said in last["message"]
        made.script = endless
        with opened(server) as client:  # it holds a few messages, and reads no more until they are taken
            send(client, PCM, "Endless.", DONE)
            with opened(server) as other:
                send(other, PCM, "One.", DONE)
                assert up_to(other, "audio.done")[1] == pcm("One.")
            [slow] = [request for request in made.requests if text_of(request) == "Endless."]
            assert made.cancelled.get(timeout=120) == slow.request_id


def test_a_text_has_a_deadline() -> None:
    with live(service(), ServerSettings(drain_seconds=1, upload_seconds=0.5)) as server, opened(server) as client:
        send(client, PCM, "Hello")
        last, _ = ended(client)
        assert "within 0.5 seconds (upload_seconds)" in last["message"]


def test_a_websocket_needs_the_key_and_no_other_sites_page_opens_it() -> None:
    """A browser opens a websocket to another site without asking first: `Origin` and `Host` keep its pages out."""
    made = service()
    hers = Tenant(name="ann", digests=(digest("hers"),), max_requests=1, requests_per_minute=3)
    settings = ServerSettings(drain_seconds=1, api_key="secret", tenants=(hers,), max_bodies_bytes=2 * MESSAGE_BYTES)
    key = {"Authorization": "Bearer secret"}
    with live(made, settings) as server:
        for headers, status, code in (
            ({}, 401, "invalid_api_key"),
            ({"Authorization": "Bearer wrong"}, 401, "invalid_api_key"),
            ({**key, "Origin": "https://other.example"}, 403, "cross_site"),
            ({**key, "Origin": "null"}, 403, "cross_site"),
        ):
            with pytest.raises(InvalidStatus) as refused:
                opened(server, **headers)
            answer = refused.value.response
            assert (answer.status_code, json.loads(answer.body or b"")["error"]["code"]) == (status, code)
            assert "X-Request-Id" in answer.headers
        with opened(server, Authorization="Bearer hers") as client:
            with pytest.raises(InvalidStatus, match="429"):  # a session is one of her requests
                opened(server, Authorization="Bearer hers")
            send(client, PCM, "One.", DONE, "Two.", DONE, "Three.", DONE, "Four.")
            last, closed = ended(client)
            assert (last["error"]["code"], closed) == ("rate_limit_exceeded", 1013)
        assert {request.tenant for request in made.requests} == {"ann"}
        own = {**key, "Origin": f"http://127.0.0.1:{server.port}"}
        with opened(server, **own), opened(server, **key), pytest.raises(InvalidStatus, match="503"):
            opened(server, **key)
        counted, said = f'segue_http_requests_total{{endpoint="{PATH}",method="GET",status="101"}} 3.0', ""
        for _ in range(200):  # a session is counted once the server has seen its end
            if counted in (said := httpx.get(f"{server.url}/metrics", timeout=120).text):
                break
        assert counted in said


def test_a_refused_handshake_is_answered_by_any_server() -> None:
    handshake = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    with live(service(), ServerSettings(drain_seconds=1, api_key="secret")) as server:
        for headers, status in (({}, 401), ({"Origin": "https://other.example"}, 403), ({"Host": "a.example"}, 421)):
            answer = httpx.get(f"{server.url}{PATH}", headers={**handshake, **headers}, timeout=120)
            assert answer.status_code == status
    sent: list[Message] = []

    async def handshaken() -> None:
        async def receive() -> Message:
            return {"type": "websocket.connect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": PATH, "headers": [], "query_string": b"", "subprotocols": []}
        await create_app(service(), ServerSettings(api_key="secret"))(scope, receive, send)

    asyncio.run(handshaken())
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_other_paths_are_no_websockets(server: Live) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{server.port}/v1/audio/speech", proxy=None)
    assert refused.value.response.status_code == 404
    assert "no such websocket" in json.loads(refused.value.response.body or b"")["error"]["message"]
    plain = httpx.get(f"{server.url}{PATH}", timeout=120)
    assert (plain.status_code, plain.headers["upgrade"]) == (426, "websocket")
    assert plain.json()["error"]["code"] == "upgrade_required"
