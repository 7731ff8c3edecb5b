"""A client that leaves frees what it used at once; one that reads slowly holds up only itself."""

from __future__ import annotations

import queue
import socket
from collections.abc import AsyncGenerator

import httpx
import pytest
from fake_service import FakeService, Gate, audio, finished, live, sent

from segue.messages.deltas import Delta, TextDelta
from segue.messages.request import Request
from segue.server.settings import ServerSettings

HELLO = [{"role": "user", "content": "Say hello"}]


def post(port: int, body: dict[str, object], *, receive_buffer: int | None = None) -> socket.socket:
    asked = {"model": "fake-omni", "messages": HELLO, **body}
    return sent(port, "/v1/chat/completions", asked, receive_buffer=receive_buffer)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_is_cancelled(stream: bool, begun: bool, n: int) -> None:
    """By its leaving: nothing else ever ends what was asked."""
    gate, there = Gate(), queue.Queue[str]()

    async def hangs(request: Request) -> AsyncGenerator[Delta]:
        if begun:
            yield TextDelta("thinker", "x")
        there.put(request.request_id)
        await gate.wait()
        yield finished()

    service = FakeService(hangs)
    with live(service) as server:
        sock = post(server.port, {"stream": stream, "n": n})
        asked = {there.get(timeout=120) for _ in range(n)}
        if stream and begun:
            assert sock.recv(10)
        sock.close()
        assert {service.cancelled.get(timeout=120) for _ in range(n)} == asked
        assert asked == {request.request_id for request in service.requests}


def test_nothing_is_made_ahead_of_a_client_that_does_not_read_and_its_leaving_is_seen() -> None:
    made = 0

    async def floods(request: Request) -> AsyncGenerator[Delta]:
        nonlocal made
        while True:
            made += 1
            yield audio(0, 240_000)

    service = FakeService(floods)
    with live(service) as server, httpx.Client(base_url=server.url, timeout=120) as other:
        sock = post(server.port, {"stream": True, "modalities": ["audio"]}, receive_buffer=4096)
        assert sock.recv(10)
        for _ in range(100):
            # turns of the server's loop, each of which would make a delta of 640 kB if nothing held it back
            assert other.get("/health").status_code == 200
        assert made < 15
        sock.close()
        service.cancelled.get(timeout=120)


def test_a_slow_reader_does_not_hold_up_others() -> None:
    async def floods(request: Request) -> AsyncGenerator[Delta]:
        if "audio" not in request.modalities:
            yield TextDelta("thinker", "quick")
            yield finished()
            return
        while True:
            yield audio(0, 240_000)

    service = FakeService(floods)
    with live(service) as server:
        sock = post(server.port, {"stream": True, "modalities": ["audio"]}, receive_buffer=4096)
        assert sock.recv(10)
        for _ in range(20):
            answer = httpx.post(
                f"{server.url}/v1/chat/completions", json={"model": "fake-omni", "messages": HELLO}, timeout=120
            )
            assert answer.json()["choices"][0]["message"]["content"] == "quick"
        sock.close()


def test_a_client_that_stops_reading_is_given_up() -> None:
    async def floods(request: Request) -> AsyncGenerator[Delta]:
        while True:
            yield audio(0, 240_000)

    service = FakeService(floods)
    with live(service, ServerSettings(stall_seconds=0.3, drain_seconds=1)) as server:
        sock = post(server.port, {"stream": True, "modalities": ["audio"]}, receive_buffer=4096)
        service.cancelled.get(timeout=120)
        sock.close()


def test_a_client_that_does_not_read_does_not_keep_the_server_from_ending() -> None:
    async def floods(request: Request) -> AsyncGenerator[Delta]:
        while True:
            yield audio(0, 240_000)

    service = FakeService(floods)
    with live(service, ServerSettings(drain_seconds=0.1)) as server:
        sock = post(server.port, {"stream": True, "modalities": ["audio"]}, receive_buffer=4096)
        assert sock.recv(10)
    # the context has ended the server, though nothing more was read
    service.cancelled.get(timeout=120)
    sock.close()


def test_a_client_that_leaves_while_sending_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService()
    with live(service) as server:
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        sock.close()
        assert httpx.get(f"{server.url}/health", timeout=120).status_code == 200
    assert service.requests == []
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_finished_request_is_not_cancelled() -> None:
    service = FakeService()
    with live(service) as server:
        url = f"{server.url}/v1/chat/completions"
        for stream in (False, True):
            httpx.post(url, json={"model": "fake-omni", "messages": HELLO, "stream": stream}, timeout=120)
        with pytest.raises(queue.Empty):
            service.cancelled.get_nowait()


def test_a_drain_that_takes_too_long_ends_the_request() -> None:
    gate = Gate()

    async def hangs(request: Request) -> AsyncGenerator[Delta]:
        await gate.wait()
        yield finished()

    service = FakeService(hangs)
    with live(service, ServerSettings(drain_seconds=1)) as server:
        sock = post(server.port, {})
        assert gate.reached.wait(120)
    # the context has ended the server while the request hung
    assert service.cancelled.get(timeout=120) == service.requests[0].request_id
    sock.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
