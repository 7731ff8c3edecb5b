"""A client that leaves frees what it used within a second; one that reads slowly holds up only itself."""

from __future__ import annotations

import json
import queue
import socket
import time
from collections.abc import AsyncGenerator

import httpx
import pytest
from fake_service import FakeService, Gate, audio, finished, live

from segue.messages.deltas import Delta, TextDelta
from segue.messages.request import Request
from segue.server.settings import ServerSettings

HELLO = [{"role": "user", "content": "Say hello"}]


def post(port: int, body: dict[str, object], *, receive_buffer: int | None = None) -> socket.socket:
    """A raw client that has sent its request."""
    data = json.dumps({"model": "fake-omni", "messages": HELLO, **body}).encode()
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect(("127.0.0.1", port))
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    sock.sendall(head.encode() + data)
    return sock


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_is_cancelled_within_a_second(stream: bool, begun: bool, n: int) -> None:
    gate = Gate()

    async def hangs(request: Request) -> AsyncGenerator[Delta]:
        if begun:
            yield TextDelta("thinker", "x")
        await gate.wait()
        yield finished()

    service = FakeService(hangs)
    with live(service) as server:
        sock = post(server.port, {"stream": stream, "n": n})
        assert gate.reached.wait(10)
        if stream and begun:
            assert sock.recv(10)
        left = time.monotonic()
        sock.close()
        gone = {service.cancelled.get(timeout=5) for _ in range(n)}
        assert time.monotonic() - left < 1.0
        assert gone == {request.request_id for request in service.requests}


def test_nothing_is_made_ahead_of_a_client_that_does_not_read_and_its_leaving_is_seen() -> None:
    made = 0

    async def floods(request: Request) -> AsyncGenerator[Delta]:
        nonlocal made
        while True:
            made += 1
            yield audio(0, 240_000)

    service = FakeService(floods)
    with live(service) as server, httpx.Client(base_url=server.url) as other:
        sock = post(server.port, {"stream": True, "modalities": ["audio"]}, receive_buffer=4096)
        assert sock.recv(10)
        for _ in range(100):
            # turns of the server's loop, each of which would make a delta of 640 kB if nothing held it back
            assert other.get("/health").status_code == 200
        assert made < 15
        left = time.monotonic()
        sock.close()
        service.cancelled.get(timeout=5)
        assert time.monotonic() - left < 1.0


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
                f"{server.url}/v1/chat/completions", json={"model": "fake-omni", "messages": HELLO}, timeout=5
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
        service.cancelled.get(timeout=5)
        sock.close()


def test_a_client_that_leaves_while_sending_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService()
    with live(service) as server:
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        sock.close()
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert service.requests == []
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_finished_request_is_not_cancelled() -> None:
    service = FakeService()
    with live(service) as server:
        url = f"{server.url}/v1/chat/completions"
        for stream in (False, True):
            httpx.post(url, json={"model": "fake-omni", "messages": HELLO, "stream": stream})
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
        assert gate.reached.wait(10)
    # the context has ended the server while the request hung
    assert service.cancelled.get(timeout=1) == service.requests[0].request_id
    sock.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
