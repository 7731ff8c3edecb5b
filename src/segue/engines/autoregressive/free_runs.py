"""Free blocks as runs of consecutive numbers, so that a sequence's blocks follow each other wherever they can.

Attention reads a run of consecutive blocks in place; a scattered sequence must be copied together first. A sequence
grows into the block after its last one while that is free; a new one starts in the middle of the longest free run, so
that those before it and it have room to grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class FreeRuns:
    """A set of block numbers from 0 to `total` - 1, all of them in it at first."""

    def __init__(self, total: int) -> None:
        self._starts = [0] if total else []
        """Sorted."""
        self._lengths = {0: total} if total else {}
        """By start of the run."""
        self._count = total

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start in self._starts:
            yield from range(start, start + self._lengths[start])

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks of the set: those that follow `after`, then in as few runs as there are.

        The caller has checked that there are so many.
        """
        taken: list[int] = []
        while len(taken) < count:
            wanted = count - len(taken)
            start = -1 if after is None else after + 1
            if start not in self._lengths:
                start = self._place(wanted)
            size = min(wanted, self._lengths[start])
            self._cut(start, size)
            taken += range(start, start + size)
            after = taken[-1]
        return taken

    def give(self, block: int) -> None:
        """Put a block back that is not in the set."""
        index = bisect_left(self._starts, block)
        self._count += 1
        length = 1
        if index < len(self._starts) and self._starts[index] == block + 1:
            del self._starts[index]
            length += self._lengths.pop(block + 1)
        before = self._starts[index - 1] if index else -1
        if index and before + self._lengths[before] == block:
            self._lengths[before] += length
        else:
            self._starts.insert(index, block)
            self._lengths[block] = length

    def _place(self, wanted: int) -> int:
        """Start of a run, after splitting the longest one where a new sequence should begin."""
        start, length = max(self._lengths.items(), key=lambda run: (run[1], -run[0]))
        # before block 0 there is nobody who could grow
        skipped = 0 if start == 0 else max(0, min(length // 2, length - wanted))
        if skipped:
            self._lengths[start] = skipped
            self._lengths[start + skipped] = length - skipped
            self._starts.insert(bisect_left(self._starts, start) + 1, start + skipped)
        return start + skipped

    def _cut(self, start: int, size: int) -> None:
        """Take the first `size` blocks of the run at `start`."""
        self._count -= size
        index = bisect_left(self._starts, start)
        rest = self._lengths.pop(start) - size
        if rest:
            self._starts[index] = start + size
            self._lengths[start + size] = rest
        else:
            del self._starts[index]
