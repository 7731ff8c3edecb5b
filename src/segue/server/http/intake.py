"""Limits the total size of the bodies of all unanswered requests, and of the messages of all websockets."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from segue.server.http.errors import Busy, error_response

MESSAGE_BYTES = 4 << 20
"""Most bytes of one message of a websocket; it may have a recording."""


class Intake:
    """ASGI middleware that bounds the bytes of bodies in memory.

    The bytes read count until the request is answered, because its parts live that long in some form. A request whose
    next piece would exceed the bound is refused; requests accepted before continue. Each websocket may hold a whole
    message, and all of them together are within a bound of the same size, so that idle ones keep no request out.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._held = 0
        """Bytes."""
        self._websockets = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        own = 0

        async def counted() -> Message:
            nonlocal own
            message = await receive()
            size = len(message.get("body", b""))
            if size and self._held + size > self._most:
                raise Busy(f"request bodies already take {self._most} bytes (max_bodies_bytes); try again later")
            own += size
            self._held += size
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= own

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = max(1, self._most // MESSAGE_BYTES)
        if self._websockets >= most:
            busy = Busy(f"{most} websockets are open, as many as max_bodies_bytes allows; try again later")
            await error_response(busy)(scope, receive, send)
            return
        self._websockets += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._websockets -= 1
