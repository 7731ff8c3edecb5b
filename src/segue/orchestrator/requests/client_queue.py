"""The deltas that wait for a request's client, and when its stages should wait for the client as well."""

from __future__ import annotations

import asyncio

from segue.messages.deltas import (
    AudioDelta,
    ClassesDelta,
    Delta,
    EmbeddingDelta,
    EncodedDelta,
    ImageDelta,
    TextDelta,
    TokensDelta,
    VideoDelta,
)
from segue.messages.errors import SegueError

_DELTA_BYTES = 256
"""Counted for each delta, in addition to its content."""
_TOKEN_BYTES = 256
"""Counted for each token of which log-probabilities are there."""


class ClientQueue:
    """A queue without a bound of its own: what is in flight when its stages are paused still has a place."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes that may wait before `behind` is set."""
        self._limit = limit
        self._items: asyncio.Queue[Delta | SegueError] = asyncio.Queue()
        self.nbytes = 0
        """Bytes that the client has not taken."""
        self.behind = False
        """True from when more than `limit` bytes wait until at most half of `limit` do."""

    def put(self, item: Delta | SegueError) -> bool:
        """Add an item; return whether the client has fallen behind by it."""
        self._items.put_nowait(item)
        self.nbytes += _nbytes(item)
        fell = not self.behind and self.nbytes > self._limit
        self.behind = self.behind or fell
        return fell

    async def get(self) -> tuple[Delta | SegueError, bool]:
        """Take the next item; return it, and whether the client has caught up by it."""
        item = await self._items.get()
        self.nbytes -= _nbytes(item)
        caught = self.behind and self.nbytes <= self._limit // 2
        self.behind = self.behind and not caught
        return item, caught


def _nbytes(item: Delta | SegueError) -> int:
    """Return about as many bytes as an item takes."""
    if isinstance(item, AudioDelta):
        content = len(item.samples)
    elif isinstance(item, ImageDelta | VideoDelta | EncodedDelta | EmbeddingDelta | ClassesDelta):
        content = len(item.data)
    elif isinstance(item, TextDelta):
        positions = [*item.logprobs, *item.prompt_logprobs]
        tokens = sum(1 + len(position.top) for position in positions if position is not None)
        ids = len(item.token_ids) + len(item.prompt_token_ids)
        content = 4 * len(item.text) + 8 * ids + _TOKEN_BYTES * tokens
    elif isinstance(item, TokensDelta):
        content = 4 * len(item.text) + 64 * len(item.token_ids)
    else:
        content = 0
    return _DELTA_BYTES + content
