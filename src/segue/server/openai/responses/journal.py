"""The events of a background response, kept in order for clients that connect at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator


class Journal:
    """Event i has sequence number i. Used on one event loop."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._more = asyncio.Event()
        self.size = 0
        """Total bytes of the events."""
        self.ended = False
        """Whether it is complete."""

    def add(self, events: list[bytes], *, last: bool = False) -> None:
        """Append events and wake the listeners. `last`: the journal is then complete."""
        self._events += events
        self.size += sum(map(len, events))
        self.ended = last
        self._more.set()
        self._more = asyncio.Event()

    async def after(self, number: int) -> AsyncGenerator[bytes]:
        """Yield the events with a higher sequence number as they come. The first value, empty, comes at once, so that a
        listener knows that it is registered before there is an event."""
        yield b""
        place = number + 1
        while True:
            while place < len(self._events):
                yield self._events[place]
                place += 1
            if self.ended:
                return
            await self._more.wait()
