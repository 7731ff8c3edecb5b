"""The first-fit allocator against a row of cells."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.connectors.intervals import Intervals

LENGTH = 24


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 10)), max_size=60))
def test_like_a_row_of_cells(steps: list[tuple[bool, int]]) -> None:
    intervals = Intervals(LENGTH)
    cells = [False] * LENGTH
    taken: list[tuple[int, int]] = []
    for take, number in steps:
        if take:
            fits = [s for s in range(LENGTH - number + 1) if not any(cells[s : s + number])]
            start = intervals.take(number)
            assert start == (fits[0] if fits else None)
            if start is not None:
                cells[start : start + number] = [True] * number
                taken.append((start, number))
        elif taken:
            start, count = taken.pop(number % len(taken))
            cells[start : start + count] = [False] * count
            intervals.give(start, count)
        assert [any(start <= i < end for start, end in intervals.free) for i in range(LENGTH)] == [not c for c in cells]
        assert all(left[1] < right[0] for left, right in zip(intervals.free, intervals.free[1:], strict=False))
        assert intervals.empty == (not any(cells))


def test_giving_back_twice_is_our_mistake() -> None:
    intervals = Intervals(8)
    assert intervals.take(4) == 0
    intervals.give(0, 4)
    with pytest.raises(AssertionError, match="twice"):
        intervals.give(0, 4)
