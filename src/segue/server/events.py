"""Server-sent events, as OpenAI streams them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from segue.messages.errors import SegueError
from segue.server.errors import error_body

_DONE = b"data: [DONE]\n\n"


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _named_event(body: dict[str, object]) -> bytes:
    return b"event: " + str(body["type"]).encode() + b"\n" + _event(body)


async def events(bodies: AsyncGenerator[dict[str, object]]) -> AsyncGenerator[bytes]:
    """Each body as an event, up to `[DONE]`. An error before the first event is raised; after it, it is the last."""
    begun = False
    async with aclosing(bodies):
        try:
            async for body in bodies:
                begun = True
                yield _event(body)
        except SegueError as error:
            if not begun:
                raise
            yield _event(error_body(error))
            return
    yield _DONE


async def named_events(bodies: AsyncGenerator[dict[str, object]]) -> AsyncGenerator[bytes]:
    """Each body as an event of its `type`. An error before the first event is raised; after it, it is the last."""
    begun = False
    async with aclosing(bodies):
        try:
            async for body in bodies:
                begun = True
                yield _named_event(body)
        except SegueError as error:
            if not begun:
                raise
            yield b"event: error\n" + _event(error_body(error))
