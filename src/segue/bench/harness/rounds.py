"""Rounds that several workloads share: ways that take turns in this process, and sides that are compared request by
request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Generic, TypeVar

from segue.bench.harness.load import (
    LoadDriver,
    LoadSlice,
    OutcomeT,
    RequestT,
    Turn,
    by_side,
    closed,
    in_turn,
    turn,
    warm_up,
)
from segue.bench.harness.stats import Ratio, Summary, ratio, summary

MadeT = TypeVar("MadeT")


def rotated(ways: Iterable[Callable[[], dict[str, float]]], warm: int, rounds: int) -> dict[str, list[float]]:
    """Run each way once per round, in rotating order, so that noise affects all. A way returns seconds by name; returns
    those of every round after `warm` rounds."""
    order, seconds = list(ways), dict[str, list[float]]()
    for _ in range(warm + rounds):
        for way in order:
            for name, took in way().items():
                seconds.setdefault(name, []).append(took)
        order.append(order.pop(0))
    return {name: values[warm:] for name, values in seconds.items()}


def milliseconds(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 90th percentile, of at least two values."""
    return median(seconds) * 1e3, quantiles(seconds, n=10)[-1] * 1e3


def median_ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of every round."""
    return median(a / b for a, b in zip(mine, theirs, strict=True))


@dataclass
class Reply(Generic[MadeT]):
    """An outcome of Segue or of a loop, which returns its first output with the last. Times are time.monotonic()."""

    made: MadeT
    first: float = 0.0
    """The first output; 0: there was none."""
    end: float = 0.0
    sent: float = 0.0

    @property
    def jct(self) -> float:
        return self.end - self.sent

    @property
    def first_output(self) -> float:
        """Seconds from sending the request."""
        return self.first - self.sent


@dataclass(frozen=True)
class Compared(Generic[RequestT, OutcomeT]):
    """One side at one load, and the first side with the same requests."""

    wall: float
    """Seconds of all turns of this side."""
    rounds: list[list[tuple[RequestT, OutcomeT, OutcomeT]]]
    """Of every round: each request, the first side's outcome, and this side's."""

    @property
    def outcomes(self) -> list[OutcomeT]:
        return [mine for of_round in self.rounds for _, _, mine in of_round]

    def only(self, wanted: Callable[[RequestT], bool]) -> Compared[RequestT, OutcomeT]:
        """The same of some requests; the turns' seconds stay."""
        return replace(self, rounds=[[one for one in of_round if wanted(one[0])] for of_round in self.rounds])

    def summary(self, figure: Callable[[OutcomeT], float]) -> Summary:
        return summary([figure(one) for one in self.outcomes])

    def of_first(self, figure: Callable[[OutcomeT], float]) -> Ratio:
        """This side's figure divided by the first side's."""
        return ratio([[(figure(mine), figure(first)) for _, first, mine in of_round] for of_round in self.rounds])

    def first_of_it(self, figure: Callable[[OutcomeT], float]) -> Ratio:
        """The first side's figure divided by this side's."""
        return ratio([[(figure(first), figure(mine)) for _, first, mine in of_round] for of_round in self.rounds])

    def equal(self, same: Callable[[OutcomeT, OutcomeT], bool]) -> float:
        """The share of requests with the same answer on both sides."""
        both = [same(first, mine) for of_round in self.rounds for _, first, mine in of_round]
        return sum(both) / len(both)


def wall_of(taken: LoadSlice[OutcomeT]) -> str:
    return f"{taken.wall:.1f} s"


async def compared(
    drivers: Sequence[LoadDriver[RequestT, OutcomeT]],
    warm: Sequence[RequestT],
    rounds: Sequence[Sequence[RequestT]],
    clients: int,
    say: Callable[[str], None],
    speed: Callable[[LoadSlice[OutcomeT]], str] = wall_of,
    its_turn: Turn = turn,
) -> dict[str, Compared[RequestT, OutcomeT]]:
    """Measure rounds of a closed loop, after `warm` requests that do not count. Returns each side, compared with the
    first. `speed`, `its_turn`: as in `in_turn`."""
    load = closed(clients)
    say(f"{clients} clients")
    await warm_up(drivers, warm, load, clients)
    slices = by_side(await in_turn(drivers, rounds, load, clients, say, speed, its_turn))
    first = slices[drivers[0].name]
    return {
        side: Compared(
            sum(one.wall for one in taken),
            [
                list(zip(asked, one.outcomes, mine.outcomes, strict=True))
                for asked, one, mine in zip(rounds, first, taken, strict=True)
            ],
        )
        for side, taken in slices.items()
    }
