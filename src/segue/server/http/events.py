"""Server-sent events in OpenAI's format."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from segue.messages.errors import SegueError
from segue.server.http.errors import error_body

_DONE = b"data: [DONE]\n\n"


def event_bytes(body: object, name: str | None = None) -> bytes:
    """Encode one event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


async def events(bodies: AsyncGenerator[dict[str, object]], *, named: bool = False) -> AsyncGenerator[bytes]:
    """Encode each body as an event, then `[DONE]`. An error before the first event is raised; a later one is the last
    event. `named`: each event has the body's `type` as its name, and no `[DONE]` follows."""
    begun = False
    async with aclosing(bodies):
        try:
            async for body in bodies:
                begun = True
                yield event_bytes(body, str(body["type"]) if named else None)
        except SegueError as error:
            if not begun:
                raise
            yield event_bytes(error_body(error), "error" if named else None)
            return
    if not named:
        yield _DONE
