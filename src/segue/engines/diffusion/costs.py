"""What a call of the network costs on this device, measured: how many rows are worth a call.

For samples of few tokens a call of two rows takes hardly longer than one of one; for many tokens the products are near
the machine's peak already, and two rows take twice as long: then a larger batch only makes the shortest request wait.
So a batch is as large as saves enough of the time per row.

Measured in the warm-up, on made-up samples, for 1, 2, 4, … rows; on a CPU every real call is entered as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

GAIN = 0.1
"""A batch twice as large has to save this share of the time per row. Where it saves less, what it adds in throughput is
worth less than serving the shortest request alone: simulated at half to nine tenths of the capacity, with four requests
of 4 steps to one of 50, the mean completion time is shortest so."""
_NOISE = 0.02
"""Smaller savings are none."""
_WEIGHT = 0.2
"""Of a new measurement against what was known."""


@dataclass(slots=True)
class CostTable:
    """Seconds per row of a call, by latent tokens of a row and by rows: 1, 2, up to 4, up to 8, …"""

    per_row: dict[int, dict[int, float]] = field(default_factory=dict)

    def enter(self, tokens: int, rows: int, seconds: float) -> None:
        """A call was measured."""
        known = self.per_row.setdefault(tokens, {})
        size = _class(rows)
        before = known.get(size, seconds / rows)
        known[size] = before + _WEIGHT * (seconds / rows - before)

    def of(self, tokens: int, rows: int) -> float:
        """Seconds that a call takes, about: from the nearest that were measured. Tokens times rows where none were."""
        if not self.per_row:
            return float(tokens * rows)
        near, sizes = self._nearest(tokens)
        beside = min(sizes, key=lambda size: abs(math.log(size / rows)))
        return sizes[beside] * rows * tokens / near

    def rows_worth(self, tokens: int, most: int, *, explore: bool = False) -> int:
        """The largest batch, up to `most` rows, that saves enough of the time per row of every smaller one; a size
        between two that does not, but is no dearer, is passed over (calls are not measured to the percent).

        What was never measured is tried at twice the rows that were, and with `explore` what was found not to be worth
        it. Tokens that were not measured are judged like the nearest that were.
        """
        if not self.per_row:
            return most
        _, sizes = self._nearest(tokens)
        best = min(sizes)
        for size in sorted(sizes):
            if sizes[size] <= sizes[best] * (1 - GAIN) ** math.log2(size / best):
                best = size
        if explore or 2 * best not in sizes:
            best *= 2
        return min(best, most)

    def _nearest(self, tokens: int) -> tuple[int, dict[int, float]]:
        near = min(self.per_row, key=lambda known: abs(math.log(known / tokens)))
        return near, self.per_row[near]


def measure(
    table: CostTable,
    tokens: int,
    most: int,
    call: Callable[[int], float],
    within: float,
    clock: Callable[[], float],
    uncounted: int = 1,
) -> None:
    """Enter calls of 1, 2, 4, …, `most` rows, each the quicker of two after some that are not counted, until the time
    per row falls no longer or `within` seconds are over. `call`: makes one of so many rows, gives its seconds."""
    begin, rows = clock(), 1
    while rows <= most and clock() - begin < within:
        for _ in range(uncounted):
            call(rows)
        table.enter(tokens, rows, min(call(rows), call(rows)))
        sizes = table.per_row[tokens]
        if rows > 1 and sizes[rows] > (1 - _NOISE) * sizes[rows // 2]:
            return
        rows *= 2


def _class(rows: int) -> int:
    """The power of two that is not below."""
    return int(1 << (rows - 1).bit_length())
