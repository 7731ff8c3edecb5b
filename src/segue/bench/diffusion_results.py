"""The result of `segue bench diffusion`, as its JSON file holds it, and how it is made from outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from segue.bench.diffusion_workload import PictureOutcome, largest_difference, mean_difference
from segue.bench.load import LoadSlice
from segue.bench.load_results import LoadResult
from segue.bench.stats import Summary, mean, summary


class DiffusionSettings(msgspec.Struct, kw_only=True):
    """What was run."""

    model: str
    pipeline: str
    dtype: str
    seed: int
    rounds: int
    threads: int
    guidance: float
    versions: dict[str, str]
    ceiling: float
    """Floating-point operations per second of a product of large matrices, on this machine with as many threads."""


class DiffusionSide(msgspec.Struct, kw_only=True):
    """One side in one scenario, all rounds together. Times in seconds."""

    requests: int
    wall: float
    images_per_second: float
    steps_per_second: float
    """Denoising steps of all requests; each is a call's row per guidance branch."""
    by_round: list[float]
    """Steps per second of each round."""
    jct: Summary
    jct_by_steps: dict[int, Summary]
    first_preview: Summary
    of_ceiling: float
    """What the network's own operations are of those that the ceiling allows in the wall time; encoders, decoder and
    waiting count against it."""
    network_of_ceiling: float | None = None
    """The same of the seconds in which the denoiser steps (of `diffusers`: in which its network is called)."""
    pss_bytes: int
    """Memory of the side's processes when its turns were over."""
    largest_difference: float = 0.0
    """Between pictures of equal requests and those of the first side, in [0, 1]."""
    mean_difference: float = 0.0
    """Of all their values."""


class DiffusionScenario(msgspec.Struct, kw_only=True):
    """One load on every side; ratios are of what is in `sides`."""

    name: str
    size: int
    clients: int
    """0: arrivals of a Poisson process."""
    rate: float = 0.0
    """Of those, per second."""
    sides: dict[str, DiffusionSide]


class DiffusionResult(LoadResult, kw_only=True):
    benchmark: str = "diffusion"
    settings: DiffusionSettings
    scenarios: list[DiffusionScenario] = msgspec.field(default_factory=list)


def side_of(
    slices: Sequence[LoadSlice[PictureOutcome]],
    first: Sequence[LoadSlice[PictureOutcome]],
    ideal: float,
    pss_bytes: int,
    denoising: float | None = None,
) -> DiffusionSide:
    """Of the slices of one side; `first`: those of the side it is compared with; `ideal`: seconds that a step would
    take at the ceiling; `denoising`: seconds of the denoiser's steps, where the outcomes do not tell."""
    outcomes = [one for taken in slices for one in taken.outcomes]
    theirs = [one for taken in first for one in taken.outcomes]
    wall = sum(taken.wall for taken in slices)
    steps = sum(one.steps for one in outcomes)
    denoising = denoising or sum(one.network for one in outcomes)
    return DiffusionSide(
        requests=len(outcomes),
        wall=wall,
        images_per_second=len(outcomes) / wall,
        steps_per_second=steps / wall,
        by_round=[sum(one.steps for one in taken.outcomes) / taken.wall for taken in slices],
        jct=summary([one.jct for one in outcomes]),
        jct_by_steps={
            count: summary([one.jct for one in outcomes if one.steps == count])
            for count in sorted({one.steps for one in outcomes})
        },
        first_preview=summary([one.first_preview for one in outcomes]),
        of_ceiling=steps * ideal / wall,
        network_of_ceiling=steps * ideal / denoising if denoising else None,
        pss_bytes=pss_bytes,
        largest_difference=largest_difference(outcomes, theirs),
        mean_difference=mean_difference(outcomes, theirs),
    )


def mean_jct(outcomes: Sequence[PictureOutcome]) -> float:
    return mean([one.jct for one in outcomes])
