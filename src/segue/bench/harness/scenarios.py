"""Loads on several sides: what the settings, outcomes, sides and levels of workloads have in common, in the format of
their JSON files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from segue.bench.harness.load import LoadSlice, OutcomeT
from segue.bench.harness.stats import Ratio, Summary, mean, ratio


class LoadSettings(msgspec.Struct, kw_only=True):
    """Settings of a run."""

    model: str
    dtype: str
    seed: int
    rounds: int
    environment: dict[str, str] = {}
    """Environment variables of all sides' processes; empty in older files, where only Segue's workers had any."""


class LoadOutcome(msgspec.Struct, kw_only=True):
    """One answered request. Times are seconds since the client sent it."""

    index: int
    jct: float
    """Job completion time: the whole answer at the client, including waiting in any queue."""
    sent: float = 0.0
    """time.monotonic() at the client."""


class LoadSide(msgspec.Struct, kw_only=True):
    """One side in one scenario, over all rounds. Times in seconds."""

    requests: int
    wall: float
    """Seconds in which this side worked, all rounds together."""
    by_round: list[float]
    """What it made per second of each round."""
    jct: Summary
    pss_bytes: int = 0
    """Memory of the side's processes after its last turn."""


class LoadScenario(msgspec.Struct, kw_only=True):
    """One load on every side."""

    name: str
    clients: int
    """0: arrivals of a Poisson process."""
    rate: float = 0.0
    """Arrivals per second."""


def wall_of(slices: Sequence[LoadSlice[OutcomeT]]) -> float:
    """Seconds in which a side worked."""
    return sum(taken.wall for taken in slices)


def speed(taken: LoadSlice[OutcomeT], made: Callable[[OutcomeT], float]) -> float:
    """What a round gave per second. `made`: how much a request gave."""
    return sum(made(one) for one in taken.outcomes) / taken.wall


def mean_jct(taken: LoadSlice[OutcomeT]) -> str:
    """For progress lines."""
    return f"mean JCT {mean([one.jct for one in taken.outcomes]):.2f} s"


def ratios(
    mine: Sequence[LoadSlice[OutcomeT]],
    theirs: Sequence[LoadSlice[OutcomeT]],
    metrics: Mapping[str, Callable[[OutcomeT], float]],
) -> dict[str, Ratio]:
    """Figures of mine to those of theirs; both must have the same requests in the same rounds."""
    pairs = [list(zip(a.outcomes, b.outcomes, strict=True)) for a, b in zip(mine, theirs, strict=True)]
    return {
        name: ratio([[(metric(a), metric(b)) for a, b in both] for both in pairs]) for name, metric in metrics.items()
    }
