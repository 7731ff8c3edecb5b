"""Loads on several sides: what the settings, outcomes, sides and levels of workloads have in common, in the format of
their JSON files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import msgspec

from segue.bench.harness.arguments import Bench
from segue.bench.harness.load import LoadSlice, outcomes_of
from segue.bench.harness.stats import Ratio, Summary, mean, ratio, summary


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

    def check(self, request: Any) -> None:
        """Raise unless the answer matches the request: otherwise the sides would do different work."""
        raise NotImplementedError


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


SettingsT = TypeVar("SettingsT", bound=msgspec.Struct)
OutcomeT = TypeVar("OutcomeT", bound=LoadOutcome)


def settings_of(kind: type[SettingsT], bench: Bench, **more: Any) -> SettingsT:
    """The settings of a run: `more`, and the options of the same names as the other fields."""
    options = {one.name for one in fields(bench)} - more.keys()
    return kind(**more, **{name: getattr(bench, name) for name in kind.__struct_fields__ if name in options})


def over_rounds(slices: Sequence[LoadSlice[OutcomeT]], made: Callable[[OutcomeT], float]) -> dict[str, Any]:
    """The fields of `LoadSide` that follow from its slices. `made`: how much a request gave."""
    outcomes = outcomes_of(slices)
    return {
        "requests": len(outcomes),
        "wall": sum(taken.wall for taken in slices),
        "by_round": [speed(taken, made) for taken in slices],
        "jct": summary([one.jct for one in outcomes]),
    }


def speed(taken: LoadSlice[OutcomeT], made: Callable[[OutcomeT], float]) -> float:
    """What a round gave per second."""
    return sum(made(one) for one in taken.outcomes) / taken.wall


def mean_jct(taken: LoadSlice[OutcomeT]) -> str:
    """For progress lines."""
    return f"mean JCT {mean([one.jct for one in taken.outcomes]):.2f} s"


def summaries(outcomes: Sequence[LoadOutcome], names: Sequence[str]) -> dict[str, Any]:
    """Summaries of figures of a request, by the names of its attributes."""
    return {name: summary([getattr(one, name) for one in outcomes]) for name in names}


def ratios(
    mine: Sequence[LoadSlice[OutcomeT]], theirs: Sequence[LoadSlice[OutcomeT]], names: Sequence[str]
) -> dict[str, Ratio]:
    """The same figures of mine to those of theirs; both must have the same requests in the same rounds."""
    pairs = [list(zip(a.outcomes, b.outcomes, strict=True)) for a, b in zip(mine, theirs, strict=True)]
    return {name: ratio([[(getattr(a, name), getattr(b, name)) for a, b in both] for both in pairs]) for name in names}
