"""Free blocks as runs: always the same set as a plain one, and sequences stay in one piece while there is room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from segue.engines.autoregressive.cache.blocks import FreeRuns


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 60)), max_size=60))
def test_it_is_a_set_of_blocks(total: int, actions: list[tuple[bool, int, int]]) -> None:
    runs, free, used = FreeRuns(total), set(range(total)), []
    for takes, a, b in actions:
        if takes:
            count = min(a, len(free))
            after = used[b % len(used)] if used else None
            taken = runs.take(count, after)
            assert len(set(taken)) == len(taken) == count
            assert set(taken) <= free, "a block was given twice"
            if count and after is not None and after + 1 in free:
                assert taken[0] == after + 1
            free -= set(taken)
            used += taken
        elif used:
            block = used.pop(a % len(used))
            runs.give(block)
            free.add(block)
        assert list(runs) == sorted(free)
        assert len(runs) == len(free)


@given(st.integers(1, 8), st.integers(1, 10), st.integers(0, 20))
def test_sequences_with_room_stay_in_one_piece(sequences: int, prompt: int, growth: int) -> None:
    room = 1 << sequences.bit_length()  # the longest run is halved at each arrival
    runs = FreeRuns(2 * room * (prompt + growth))
    tables = [runs.take(prompt) for _ in range(sequences)]
    for _ in range(growth):
        for table in tables:
            table += runs.take(1, table[-1])
    for table in tables:
        assert table == list(range(table[0], table[0] + len(table)))


def test_what_does_not_fit_in_one_run_takes_the_longest_first() -> None:
    runs = FreeRuns(10)
    taken = runs.take(10)
    for block in (0, 1, 4, 5, 6, 9):
        assert block in taken
        runs.give(block)
    assert runs.take(5) == [4, 5, 6, 0, 1]
    assert list(runs) == [9]
