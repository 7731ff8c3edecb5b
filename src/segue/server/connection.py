"""One TCP connection: what never becomes a request is answered here, as everything else is."""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from segue.messages.errors import InvalidRequest, SegueError
from segue.server.errors import UploadTimeout, error_response


class Connection(H11Protocol):
    """uvicorn's connection, with OpenAI's error object for what is not HTTP, and a limit to how long a request comes.

    The limit of a body is kept by who reads it (`read_body`), so that its endpoint is known to the log and the metrics;
    here it ends heads that do not come, and bodies that nobody reads any more.
    """

    upload_seconds: ClassVar[float]
    _upload: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """`msg`: uvicorn's; h11's own error says more."""
        cause = sys.exc_info()[1]
        why = str(cause) if isinstance(cause, h11.RemoteProtocolError) else msg
        self._refuse(InvalidRequest(f"this is not a request of HTTP/1.1: {why}"))

    def _watch(self) -> None:
        """Runs from the connection's begin, or a request's first bytes, to its last."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._unwatch()
        elif self._upload is None:
            self._upload = self.loop.call_later(self.upload_seconds, self._give_up)

    def _unwatch(self) -> None:
        if self._upload is not None:
            self._upload.cancel()
            self._upload = None

    def _give_up(self) -> None:
        self._upload = None
        if self.conn.our_state is h11.IDLE:
            self._refuse(UploadTimeout("head", self.upload_seconds))
        elif self.conn.our_state is not h11.SEND_RESPONSE:  # then who answers has the limit
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
        self.transport.close()


def connection_class(upload_seconds: float) -> type[Connection]:
    """What a server with this limit makes of its connections."""

    class Limited(Connection):
        pass

    Limited.upload_seconds = upload_seconds
    return Limited
