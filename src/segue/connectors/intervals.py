"""First-fit allocation over a row of units; free units are kept as sorted intervals that never touch."""

from __future__ import annotations

from bisect import bisect_left


class Intervals:
    """The free units of `[0, length)`, at first all. `take` and `give` keep intervals sorted, disjoint and merged."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.free: list[tuple[int, int]] = [(0, length)]
        """(start, end) of each free interval."""

    def take(self, count: int) -> int | None:
        """Take the first run of `count` units and return its start; None if no interval is long enough."""
        for index, (start, end) in enumerate(self.free):
            if end - start >= count:
                if end - start == count:
                    del self.free[index]
                else:
                    self.free[index] = (start + count, end)
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Free the `count` units that `take(count)` returned as `start`."""
        end = start + count
        index = bisect_left(self.free, (start, end))
        assert index == 0 or self.free[index - 1][1] <= start, "given back twice"
        assert index == len(self.free) or end <= self.free[index][0], "given back twice"
        if index < len(self.free) and self.free[index][0] == end:
            end = self.free.pop(index)[1]
        if index and self.free[index - 1][1] == start:
            index -= 1
            start = self.free.pop(index)[0]
        self.free.insert(index, (start, end))

    @property
    def empty(self) -> bool:
        """Whether nothing is taken."""
        return self.free == [(0, self.length)]
