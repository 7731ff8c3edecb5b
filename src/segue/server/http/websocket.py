"""What the websockets share: messages of JSON, and an end that says why."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from segue.messages.errors import Cancelled, InvalidRequest, SegueError, TooLarge, nearest, shown, wrong
from segue.messages.limits import RequestLimits
from segue.server.http.body import decode_json
from segue.server.http.disconnect import CLIENT_GONE
from segue.server.http.errors import UploadTimeout, error_body

Frame = dict[str, Any] | bytes
"""A message to the client: JSON, or bytes."""


class SessionTimeout(UploadTimeout):
    """The client of a websocket sent nothing more, or not all of a text."""

    def __init__(self, message: str) -> None:
        SegueError.__init__(self, message)


class Socket:
    """An accepted websocket, and how long its client may take to read a message."""

    def __init__(self, socket: WebSocket, stall_seconds: float) -> None:
        self._socket = socket
        self._stall_seconds = stall_seconds

    async def serve(self, *work: Coroutine[Any, Any, None]) -> None:
        """Accept, and run until the first of `work` ends. If it ends with an error, that is the last message; the
        others are cancelled and awaited."""
        await self._socket.accept()
        tasks = [asyncio.create_task(one) for one in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        try:
            for task in done:
                task.result()
        except (WebSocketDisconnect, Cancelled):
            self.client_gone()
        except SegueError as error:
            with suppress(WebSocketDisconnect, Cancelled):
                await self.send(error_message(error))
                await self.close(_close_code(error), error.code)

    def client_gone(self) -> None:
        """Note that the client left before its answer was complete."""
        self._socket.scope[CLIENT_GONE] = True

    async def receive(self) -> dict[str, Any] | None:
        """The client's next message, as ASGI has it; None: it has left."""
        message = await self._socket.receive()
        return None if message["type"] == "websocket.disconnect" else dict(message)

    async def send(self, frame: Frame) -> None:
        """Raises `Cancelled` if the client does not read."""
        if isinstance(frame, bytes):
            await self._while_read(self._socket.send_bytes(frame))
        else:
            await self._while_read(self._socket.send_text(msgspec.json.encode(frame).decode()))

    async def close(self, code: int = 1000, reason: str = "") -> None:
        await self._while_read(self._socket.close(code, reason))

    async def _while_read(self, sending: Coroutine[Any, Any, None]) -> None:
        """A message is sent when the client has read the one before."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                await sending
        except TimeoutError as error:
            raise Cancelled("the client stopped reading") from error


def client_message(text: str | None, kinds: Sequence[str], limits: RequestLimits) -> tuple[str, dict[str, Any]]:
    """(type, other members) of a client's message; `text` is None if it was binary; `kinds`: the types that there are.
    Raises `InvalidRequest`."""
    if text is None:
        raise InvalidRequest("the message is binary; it must be a JSON text")
    values = decode_json(text.encode(), limits)
    if not isinstance(values, dict):
        raise InvalidRequest(f"the message is {shown(values)}; it must be a JSON object")
    kind = values.pop("type", None)
    if kind not in kinds:
        near = nearest(kind, kinds) if isinstance(kind, str) else ""
        raise wrong("type", kind, f"one of {', '.join(kinds)}{near}")
    return kind, values


def error_message(error: SegueError) -> dict[str, Any]:
    """An error, as OpenAI's object, and its message where vllm-omni has it."""
    return {"type": "error", "message": error.message, **error_body(error)}


def _close_code(error: SegueError) -> int:
    """The websocket's close code (RFC 6455, and its registry)."""
    if isinstance(error, TooLarge):
        return 1009
    if error.status in (429, 503):
        return 1013
    return 1011 if error.status >= 500 else 1008
