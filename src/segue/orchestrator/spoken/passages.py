"""A text that is said while it arrives: sentence by sentence, or by appending words to one running generation
(`goes_on`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from segue.messages.errors import SegueError, TooLarge
from segue.orchestrator.spoken.sentences import Sentences
from segue.orchestrator.spoken.words import Words

MOST_SENTENCES = 1024
"""Sentences of one text; each is a generation."""
AT_ONCE = 2
"""Sentences that are made at a time: the one that is sent, and the next."""
_AHEAD = 64
"""Pieces of the next sentence that may wait for their turn."""
T = TypeVar("T")
D = TypeVar("D")


class Passage:
    """A text that is said by one generation, perhaps before all of it has arrived."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[str | SegueError | None] = asyncio.Queue()
        """Pieces that are not yet taken; None: there are no more."""

    def put(self, piece: str | SegueError | None) -> None:
        self._arrived.put_nowait(piece)

    async def pieces(self) -> AsyncGenerator[str]:
        """Yield what has arrived, as soon as there is something. Raises the `SegueError` that ends the text."""
        rest: str | SegueError | None = ""
        while rest is not None:
            text, rest = "", await self._arrived.get()
            while isinstance(rest, str):
                text += rest
                if self._arrived.empty():
                    break
                rest = self._arrived.get_nowait()
            if text:
                yield text
            if isinstance(rest, SegueError):
                raise rest


class Passages:
    """The passages of a text, from its first characters to its last."""

    def __init__(self, *, goes_on: bool) -> None:
        """`goes_on`: passages may be begun before they have arrived; else each is a whole sentence."""
        self._splitter: Sentences | Words = Words() if goes_on else Sentences()
        self._passage: Passage | None = None
        """The one of which more may arrive."""
        self._count = 0
        self._arrived: asyncio.Queue[Passage | SegueError | None] = asyncio.Queue()
        """Passages that are not yet begun; the caller bounds the text. None: the text is over."""

    async def begun(self) -> AsyncGenerator[Passage]:
        """Yield each passage when it begins to arrive. Raises the `SegueError` that ends the text."""
        while (passage := await self._arrived.get()) is not None:
            if isinstance(passage, SegueError):
                raise passage
            yield passage

    def feed(self, text: str) -> None:
        """Add to the text. Raises `TooLarge`."""
        self._put(self._splitter.feed(text))

    def finish(self) -> bool:
        """End the text; False if it has no passage. Raises `TooLarge`."""
        self._put(self._splitter.finish())
        self._end()
        self._arrived.put_nowait(None)
        return bool(self._count)

    def fail(self, error: SegueError) -> None:
        """End the text with an error: what is not begun is not said any more."""
        while not self._arrived.empty():
            self._arrived.get_nowait()
        if self._passage is not None:
            self._passage.put(error)
        self._arrived.put_nowait(error)

    def _put(self, pieces: Sequence[str | None]) -> None:
        for piece in pieces:
            if piece is None:
                self._end()
            elif isinstance(self._splitter, Words):
                self._append(piece)
            else:
                self._append(piece.strip())
                self._end()

    def _append(self, piece: str) -> None:
        """Add a piece to the passage, or begin another, unless it has nothing to say."""
        if self._passage is None:
            if not any(character.isalnum() for character in piece):
                return
            self._count += 1
            if self._count > MOST_SENTENCES:
                raise TooLarge(f"the text has more than {MOST_SENTENCES} sentences; send it in several requests")
            self._passage, piece = Passage(), piece.lstrip()
            self._arrived.put_nowait(self._passage)
        self._passage.put(piece)

    def _end(self) -> None:
        if self._passage is not None:
            self._passage.put(None)
            self._passage = None


async def in_turn(texts: AsyncGenerator[T], said: Callable[[T], AsyncGenerator[D]]) -> AsyncGenerator[D]:
    """Yield what `said` makes of the texts (deltas, or encoded pieces), one text after the other.

    The next text is begun while the pieces of one are taken, at most `AT_ONCE` together. An error of a text, or of
    `texts`, is raised in its turn. Closing this generator closes those of all texts.
    """
    slots = asyncio.Semaphore(AT_ONCE)
    begun: asyncio.Queue[_Ahead[D] | Exception | None] = asyncio.Queue()
    running: deque[_Ahead[D]] = deque()

    async def begin() -> None:
        try:
            async with aclosing(texts):
                async for text in texts:
                    await slots.acquire()
                    running.append(_Ahead(said(text)))
                    begun.put_nowait(running[-1])
        except Exception as error:  # the consumer raises it
            begun.put_nowait(error)
        else:
            begun.put_nowait(None)

    beginning = asyncio.create_task(begin())
    try:
        while (ahead := await begun.get()) is not None:
            if isinstance(ahead, Exception):
                raise ahead
            while (piece := await ahead.arrived.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
            running.popleft()
            slots.release()
    finally:
        tasks = [beginning, *(one.task for one in running)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Ahead(Generic[D]):
    """The pieces of one text, made before their turn."""

    def __init__(self, pieces: AsyncGenerator[D]) -> None:
        self.arrived: asyncio.Queue[D | Exception | None] = asyncio.Queue(_AHEAD)
        """None: there are no more."""
        self.task = asyncio.create_task(self._make(pieces))

    async def _make(self, pieces: AsyncGenerator[D]) -> None:
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    await self.arrived.put(piece)
        except Exception as error:  # the consumer raises it
            await self.arrived.put(error)
        else:
            await self.arrived.put(None)
