"""Runs work for a client only while the client is connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from segue.messages.errors import Cancelled, SegueError

T = TypeVar("T")

CLIENT_GONE = "segue.client_gone"
"""Key of the ASGI scope, set if the client disconnected before its answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects, `work` is cancelled and awaited, and `Cancelled` is raised.

    The request's body must have been read: after that, `receive` returns only when the client disconnects.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the client disconnected")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ByteStream(Response):
    """A body that is sent as it is made. The generator is closed when the client disconnects, or reads nothing for
    `stall_seconds`.

    An error before the first piece is raised, and so has its own status; a later one breaks the connection off, which
    tells the client that the body is not complete. Nothing is generated ahead of the client: a full socket stops the
    generator.
    """

    def __init__(self, pieces: AsyncGenerator[bytes], stall_seconds: float, media_type: str) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._pieces = pieces
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def run() -> None:
            nonlocal started
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    if not started:
                        started = True
                        await send(
                            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                        )
                    await self._send(send, piece, more=True)
                await self._send(send, b"", more=False)

        try:
            await while_connected(receive, run())
        except Cancelled:
            scope[CLIENT_GONE] = True
            if not started:
                raise
        except SegueError:  # its generation has logged it
            if not started:
                raise

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError as error:
            raise Cancelled("the client stopped reading") from error


class EventStream(ByteStream):
    """Server-sent events. The generator must turn errors after the first event into events."""

    def __init__(self, events: AsyncGenerator[bytes], stall_seconds: float) -> None:
        super().__init__(events, stall_seconds, "text/event-stream")
