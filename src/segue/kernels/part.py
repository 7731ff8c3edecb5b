"""One sequence's share of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np

from segue.kernels.look_back import Chunked, LookBack


class Part(NamedTuple):
    """One sequence's part of a step: its block table, and the range of its tokens that is computed.

    Where the first blocks were given back (they lie behind the window of this group), `blocks` begins after them and
    `start` and `stop` count from there: attention is causal and windows are relative, so nothing else changes.
    """

    blocks: Sequence[int]
    start: int
    stop: int
    mutual: Sequence[tuple[int, int]] = ()
    """Ranges of tokens, in order, that see each other in both directions. Each lies wholly within [start, stop) or
    outside of it."""

    def reaches(self) -> np.ndarray:
        """[stop - start] int32: for each query, how many tokens of the sequence it sees, from the first on."""
        reach = np.arange(self.start + 1, self.stop + 1, dtype=np.int32)
        for first, end in self.mutual:
            if self.start <= first and end <= self.stop:
                reach[first - self.start : end - self.start] = end
        return reach

    @property
    def causal(self) -> bool:
        """No query sees a token after it."""
        return not any(self.start <= first < self.stop for first, _ in self.mutual)


def leading_singles(parts: Sequence[Part]) -> int:
    """How many of a step's parts are single queries that no longer part comes before. Behind longer ones there are
    single queries where a border between chunks cuts them off."""
    return sum(1 for _ in takewhile(lambda part: part.stop - part.start == 1, parts))


def within_chunks(part: Part, back: LookBack, before: int, block_size: int) -> list[Part]:
    """The part as layers that look back so far see it. `before`: tokens of the sequence before its first block here.

    Where they attend in chunks, each piece of it that lies in one chunk is a sequence of its own, which begins with the
    chunk: attention is causal, so nothing else changes.
    """
    if not isinstance(back, Chunked):
        return [part]
    pieces = []
    start = part.start
    while start < part.stop:
        border = (start + before) // back.size * back.size - before
        stop = min(part.stop, border + back.size)
        blocks = part.blocks[border // block_size :] if border else part.blocks
        pieces.append(Part(blocks, start - border, stop - border))
        start = stop
    return pieces


class Span(Protocol):
    """A range of tokens of a sequence."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


def step_order(part: Span) -> tuple[bool, int]:
    """Sort key of the parts of a step, with whole positions."""
    return part.stop - part.start > 1, part.stop
