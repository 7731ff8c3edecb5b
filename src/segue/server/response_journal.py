"""The events of a response that is made in the background: kept in order, for whoever listens, whenever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator


class Journal:
    """Event i has sequence number i. Lives on one event loop."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._more = asyncio.Event()
        self.size = 0
        """Bytes of all events."""
        self.ended = False
        """No more will come."""

    def add(self, events: list[bytes], *, last: bool = False) -> None:
        """Let the listeners have them. `last`: and no more."""
        self._events += events
        self.size += sum(map(len, events))
        self.ended = last
        self._more.set()
        self._more = asyncio.Event()

    async def after(self, number: int) -> AsyncGenerator[bytes]:
        """Those with a higher sequence number, as they come. Nothing comes at once, so that a listener knows of being
        heard before there is an event."""
        yield b""
        place = number + 1
        while True:
            while place < len(self._events):
                yield self._events[place]
                place += 1
            if self.ended:
                return
            await self._more.wait()
