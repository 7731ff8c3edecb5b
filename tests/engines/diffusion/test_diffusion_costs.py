"""What the cost table makes of measurements; the times are made up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from segue.engines.diffusion.batch import CostTable, measure


class Device:
    """Calls take `fixed` seconds and `per_row` for each row; the clock goes on by what they take."""

    def __init__(self, fixed: float, per_row: float) -> None:
        self.now, self.calls, self._fixed, self._per_row = 0.0, [], fixed, per_row
        self.calls: list[int] = []

    def __call__(self, rows: int) -> float:
        self.calls.append(rows)
        seconds = self._fixed + self._per_row * rows
        self.now += seconds
        return seconds

    def clock(self) -> float:
        return self.now


def table_of(fixed: float, per_row: float, tokens: int = 64, most: int = 16, within: float = 1e9) -> CostTable:
    table, device = CostTable(), Device(fixed, per_row)
    measure(table, tokens, most, device, within, device.clock)
    return table


def test_a_batch_grows_while_rows_get_cheaper() -> None:
    assert table_of(10.0, 0.01).rows_worth(64, 16) == 16
    assert table_of(0.0, 1.0).rows_worth(64, 16) == 1
    assert table_of(0.6, 1.0).rows_worth(64, 16) == 4  # a row takes 1.6, 1.3, 1.15, 1.075


def test_a_size_that_saves_little_does_not_hide_larger_ones_that_save_much() -> None:
    table = CostTable()
    for rows, milliseconds in ((1, 70.0), (2, 52.9), (4, 47.7), (8, 38.5), (16, 35.0)):
        table.enter(64, rows, rows * milliseconds)
    assert table.rows_worth(64, 16) == 8
    assert table.rows_worth(64, 4) == 4


def test_measuring_stops_where_rows_get_no_cheaper_and_in_time() -> None:
    device = Device(0.0, 1.0)
    measure(CostTable(), 64, 16, device, 1e9, device.clock)
    assert max(device.calls) == 2
    device = Device(10.0, 0.01)
    measure(CostTable(), 64, 1024, device, 50.0, device.clock)
    assert max(device.calls) == 2


def test_calls_that_are_played_back_from_the_fourth_on_are_measured_so() -> None:
    made: list[int] = []

    def call(rows: int) -> float:
        made.append(rows)
        return {1: 30.0, 2: 30.0, 3: 500.0}.get(made.count(rows), 1.0 + 0.1 * rows)

    table = CostTable()
    measure(table, 64, 8, call, 1e9, lambda: 0.0, uncounted=2)
    assert table.per_row[64] == {1: 1.1, 2: 0.6, 4: 0.35, 8: 0.225}
    assert table.rows_worth(64, 8) == 8


def test_without_measurements_all_rows_are_tried_and_work_is_tokens() -> None:
    table = CostTable()
    assert table.rows_worth(64, 16) == 16
    assert table.of(64, 2) == 128
    table.enter(64, 1, 1.0)
    assert table.rows_worth(64, 16) == 2, "twice what is known"
    table.enter(64, 2, 1.1)
    assert table.rows_worth(64, 16) == 4
    table.enter(64, 3, 3.2)
    assert table.rows_worth(64, 16) == 2
    assert table.rows_worth(64, 16, explore=True) == 4
    assert table.rows_worth(60, 16) == 2, "like the nearest"
    assert table.rows_worth(64, 1) == 1


@given(
    st.lists(st.tuples(st.sampled_from([16, 64, 4096]), st.integers(1, 40), st.floats(1e-6, 1e3)), max_size=40),
    st.integers(1, 10000),
    st.integers(1, 64),
    st.booleans(),
)
def test_there_is_always_an_answer(
    entries: list[tuple[int, int, float]], tokens: int, most: int, explore: bool
) -> None:
    table = CostTable()
    for entry in entries:
        table.enter(*entry)
    assert 1 <= table.rows_worth(tokens, most, explore=explore) <= most
    assert table.of(tokens, most) > 0
