"""One TCP connection: answers input that never becomes a request in the same form as other errors."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
import uuid
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from segue.messages.errors import InvalidRequest, SegueError
from segue.server.http.errors import Busy, UploadTimeout, error_response
from segue.server.settings import ServerSettings

_websocket_log = logging.getLogger("uvicorn.error.websocket")
_websocket_log.setLevel(logging.WARNING)  # handshakes are in the access log, without the query
_LINGER = 0.5
"""Seconds that a refused client has to read the reason."""
_OTHER_FILES = 128
"""Open files besides connections: sockets of workers, logs, files of requests."""


class Connection(H11Protocol):
    """uvicorn's connection, with OpenAI's error object for input that is not HTTP, and a time limit for requests.

    `read_body` enforces the limit for a body, so that its endpoint appears in log and metrics. This class ends heads
    that do not arrive, and bodies that no one reads any more. It refuses new connections above `max_connections`.
    """

    limits: ClassVar[ServerSettings]
    most: ClassVar[int]
    """Most connections; at most the process's limit of open files."""
    _upload: asyncio.TimerHandle | None = None
    _refused = False
    """Whether this connection exceeds the limit."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self.connections.discard(self)
            self._refused = True
            self._refuse(Busy(f"{self.most} connections are open (max_connections); try again later"))
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """`msg`: uvicorn's; h11's own error is more precise."""
        cause = sys.exc_info()[1]
        why = str(cause) if isinstance(cause, h11.RemoteProtocolError) else msg
        self._refuse(InvalidRequest(f"this is not an HTTP/1.1 request: {why}"))

    def _watch(self) -> None:
        """Start the timer, which runs from the start of the connection, or a request's first bytes, to its last."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._unwatch()
        elif self._upload is None:
            self._upload = self.loop.call_later(self._seconds(), self._give_up)

    def _seconds(self) -> float:
        """The limit for a head: heads are small, so it is the time in which a body may arrive at any speed."""
        head = self.conn.their_state is h11.IDLE
        return min(self.limits.upload_seconds, self.limits.upload_grace) if head else self.limits.upload_seconds

    def _unwatch(self) -> None:
        if self._upload is not None:
            self._upload.cancel()
            self._upload = None

    def _give_up(self) -> None:
        self._upload = None
        if self.conn.our_state is h11.IDLE:
            self._refuse(UploadTimeout("head", self._seconds()))
        elif self.conn.our_state is h11.SEND_BODY:  # a body that is read while its answer is sent has limits of its own
            self._watch()
        elif self.conn.our_state is not h11.SEND_RESPONSE:  # until a response is sent, the body's reader has the limit
            self.transport.close()

    def _refuse(self, error: SegueError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error_response(error)
            answer.headers["Connection"] = "close"
            answer.headers["X-Request-Id"] = uuid.uuid4().hex
            for event in (
                h11.Response(status_code=answer.status_code, headers=answer.raw_headers),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self._refused and self.transport.can_write_eof():
            # if closed at once, further input would reset the connection before the client has read the answer
            self.transport.write_eof()
            self.loop.call_later(_LINGER, self.transport.close)
        else:
            self.transport.close()


class WebSocketConnection(WebSocketsSansIOProtocol):
    """uvicorn's websocket. Its socket is closed soon after its session, also if the client takes nothing any more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.logger = _websocket_log
        super().connection_made(transport)

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self.loop.call_later(self.close_timeout, self.transport.abort)


def connection_class(settings: ServerSettings) -> type[Connection]:
    """The connection class of a server with these limits."""

    class Limited(Connection):
        limits = settings
        most = min(settings.max_connections, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES))

    return Limited
