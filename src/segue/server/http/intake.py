"""Limits the total size of the bodies of all unanswered requests."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from segue.server.http.errors import Busy


class Intake:
    """ASGI middleware that bounds the bytes of bodies in memory.

    The bytes read count until the request is answered, because its parts live that long in some form. A request whose
    next piece would exceed the bound is refused; requests accepted before continue.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._held = 0
        """Bytes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
