"""Chooses the samples that take the next step together (`choose`, pure), and measures how many rows are worth a call.

The rule is *shortest remaining work first, with ageing*, within a priority (lower numbers first, as in every engine):

- the leader of a step is a sample of the request with the least work left, so that short requests do not wait for long
  ones (this minimises mean completion time: Schrage, "A proof of the optimality of the shortest remaining processing
  time discipline", 1968);
- but a sample that has been passed over `patience` times in a row is *overdue*: while there are overdue samples, the
  one passed over most often leads;
- the call is filled up with samples of the leader's bucket, in the same order, while their rows fit.

The bound: between two steps of a sample lie at most `patience + n` steps of others, if no sample of a lower priority
number is ready; n is the number of other samples of its priority when it becomes overdue. Proof: a leader's count
starts again, so each of those n leads at most once before it, and later arrivals have been passed over less often.
(Samples of a lower priority number that keep arriving pass before it forever; that is what priority means.)

`CostTable` holds the measured cost of network calls on this device. For samples of few tokens a call of two rows takes
hardly longer than a call of one; for many tokens the GEMMs are near the machine's peak already, and two rows take twice
as long, so a larger batch only makes the shortest request wait. The batch is the largest that still saves enough time
per row. Costs are measured in the warm-up, on made-up samples of 1, 2, 4, … rows; on a CPU every real call counts too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

GAIN = 0.1
"""A batch twice as large must save this share of the time per row. If it saves less, its gain in throughput is worth
less than serving the shortest request alone: simulated at half to nine tenths of the capacity, with four requests of 4
steps to one of 50, this value gives the shortest mean completion time."""
_NOISE = 0.02
"""Smaller savings count as none."""
_WEIGHT = 0.2
"""Weight of a new measurement against the known value."""


@dataclass(slots=True)
class CostTable:
    """Seconds per row of a call, by latent tokens of a row and by rows: 1, 2, up to 4, up to 8, …"""

    per_row: dict[int, dict[int, float]] = field(default_factory=dict)

    def enter(self, tokens: int, rows: int, seconds: float) -> None:
        """Record the measured time of a call."""
        known = self.per_row.setdefault(tokens, {})
        size = _class(rows)
        before = known.get(size, seconds / rows)
        known[size] = before + _WEIGHT * (seconds / rows - before)

    def of(self, tokens: int, rows: int) -> float:
        """Estimated seconds of a call, from the nearest measured one; tokens times rows if nothing was measured."""
        if not self.per_row:
            return float(tokens * rows)
        near, sizes = self._nearest(tokens)
        nearest = min(sizes, key=lambda size: abs(math.log(size / rows)))
        return sizes[nearest] * rows * tokens / near

    def rows_worth(self, tokens: int, most: int, *, explore: bool = False) -> int:
        """The largest batch, up to `most` rows, that saves enough time per row over every smaller one. A size between
        two that saves too little, but costs no more, is skipped (measurements are not accurate to the percent).

        Twice the largest measured size is tried if it was never measured, and with `explore` also if it was found not
        worth it. Unmeasured numbers of tokens are treated like the nearest measured one.
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
    """Measure calls of 1, 2, 4, …, `most` rows, each the faster of two after `uncounted` others, until the time per row
    stops falling or `within` seconds have passed. `call`: makes a call of that many rows and returns its seconds."""
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
    """The smallest power of two that is at least `rows`."""
    return int(1 << (rows - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sample that could take its next step now."""

    bucket: Hashable
    """Only samples of equal buckets share a call."""
    rows: int
    """Rows of its next call: one per guidance branch."""
    work: float
    """Remaining work of its request, in any one unit."""
    priority: int
    arrival: int
    """Lower arrived earlier; unique per sample."""
    passed: int
    """Number of steps since its last one that it could have joined but did not."""


def choose(candidates: Sequence[Candidate], max_rows: Callable[[Candidate], int], patience: int) -> Sequence[Candidate]:
    """The samples of the next call, the leader first; empty only if there are no candidates.

    `max_rows`: most rows of a call that a candidate leads. The leader is taken even if it has more.
    """
    if not candidates:
        return []

    def order(candidate: Candidate) -> tuple[float, ...]:
        overdue = candidate.passed if candidate.passed >= patience else 0
        return (candidate.priority, -overdue, candidate.work, candidate.arrival)

    first, *others = sorted(candidates, key=order)
    chosen, rows, most = [first], first.rows, max_rows(first)
    for candidate in others:
        if candidate.bucket == first.bucket and rows + candidate.rows <= most:
            chosen.append(candidate)
            rows += candidate.rows
    return chosen
