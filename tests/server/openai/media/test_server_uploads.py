"""What comes over a connection and is no whole request: OpenAI's error object, and an end to waiting."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
from fake_service import FakeService, Live, live

from segue.server.settings import ServerSettings

pytestmark = pytest.mark.slow

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
FORM = b"POST /v1/images/edits HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"


@pytest.fixture
def server() -> Iterator[Live]:
    with live(FakeService(), ServerSettings(drain_seconds=1, max_body_bytes=1000)) as server:
        yield server


@pytest.fixture
def impatient() -> Iterator[Live]:
    """Patient enough for what is sent at once to come, on a machine that does other things as well."""
    service = FakeService()
    service.card.gives = frozenset({"text", "image"})
    with live(service, ServerSettings(drain_seconds=1, max_body_bytes=1000, upload_seconds=1)) as server:
        yield server


def connected(server: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def refusal(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and error of the answer, after which the server closes the connection."""
    answer = HTTPResponse(sock)
    answer.begin()
    error = json.loads(answer.read())["error"]
    assert answer.getheader("Connection") == "close"
    assert answer.getheader("Content-Type") == "application/json"
    assert answer.getheader("X-Request-Id")
    assert sock.recv(1) == b""
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status, error


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"hello\r\n\r\n", "illegal request line"),
        (b"GET / HTTP/1.1\r\n\r\n", "Missing mandatory Host: header"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nno header\r\n\r\n", "illegal header line"),
        (HEAD + b"Content-Length: many\r\n\r\n", "bad Content-Length"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n", "illegal chunk header"),
        (b"GET /" + b"x" * 70_000, "too long"),
    ],
)
def test_what_is_not_http_is_named(server: Live, sent: bytes, why: str) -> None:
    with connected(server) as sock:
        sock.sendall(sent)
        status, error = refusal(sock)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_value")
    assert error["message"].startswith("this is not an HTTP/1.1 request: ")
    assert why in error["message"]
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("sent", "part"),
    [
        (b"", "head"),
        (HEAD, "head"),
        (HEAD + b"Content-Length: 100\r\n\r\n{", "body"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", "body"),
        (FORM + b"Content-Length: 100\r\n\r\n--b", "body"),
    ],
)
def test_what_does_not_come_is_not_waited_for(impatient: Live, sent: bytes, part: str) -> None:
    with connected(impatient) as sock:
        sock.sendall(sent)
        status, error = refusal(sock)
    assert (status, error["type"], error["code"]) == (408, "timeout_error", "request_timeout")
    assert part in error["message"]
    assert "upload_seconds" in error["message"]
    assert impatient.service.requests == []


def test_a_body_that_trickles_is_not_waited_for() -> None:
    """It could go on for ten minutes, and does come to something."""
    settings = ServerSettings(drain_seconds=1, upload_grace=0.2, upload_rate=10_000)
    with live(FakeService(), settings) as server, connected(server) as sock:
        sock.sendall(HEAD + b"Content-Length: 100000\r\n\r\n{")
        while not select.select([sock], [], [], 0.01)[0]:
            sock.sendall(b" ")
        answer = HTTPResponse(sock)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert (answer.status, error["code"]) == (408, "request_timeout")
    assert "within 0.2 seconds, nor at 10000 bytes per second" in error["message"]


def test_a_body_that_nobody_reads_is_not_waited_for(impatient: Live) -> None:
    """The answer was there before the body: the rest of it does not keep the connection."""
    with connected(impatient) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        answer = HTTPResponse(sock)
        answer.begin()
        assert answer.status == 200
        answer.read()
        sock.sendall(b"x")
        assert sock.recv(1) == b""


def test_a_body_that_came_in_pieces_is_read(server: Live) -> None:
    """And the connection goes on: a second request comes over it."""
    body = json.dumps({"model": "fake-omni", "messages": [{"role": "user", "content": "hi"}]}).encode()
    with connected(server) as sock:
        for _ in range(2):
            sock.sendall(HEAD)
            sock.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body[:10])
            sock.sendall(body[10:])
            answer = HTTPResponse(sock)
            answer.begin()
            assert answer.status == 200
            answer.read()
