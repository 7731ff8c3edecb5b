"""The result of `segue bench diffusion`, in the format of its JSON file, and its computation from outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from segue.bench.diffusion.workload import ImageSlice, differences, steps_of
from segue.bench.harness.load import outcomes_of
from segue.bench.harness.results import LoadResult
from segue.bench.harness.scenarios import LoadScenario, LoadSettings, LoadSide, speed, wall_of
from segue.bench.harness.stats import Summary, summary


class DiffusionSettings(LoadSettings, kw_only=True):
    """Settings of the run."""

    pipeline: str
    threads: int
    guidance: float
    versions: dict[str, str]
    requests: int = 0
    """Requests per round of a closed loop with several clients; half as many with one. 0 in older files."""
    ceiling: float
    """Floating-point operations per second of a large matmul on this machine with the same number of threads."""


class DiffusionSide(LoadSide, kw_only=True):
    """One side in one scenario, over all rounds; `by_round`: steps per second. Times in seconds."""

    images_per_second: float
    steps_per_second: float
    """Denoising steps of all requests; each is one row per guidance branch."""
    jct_by_steps: dict[int, Summary]
    first_preview: Summary
    of_ceiling: float
    """The network's operations as a share of those that the ceiling allows in the wall time; encoders, decoder and
    waiting reduce it."""
    network_of_ceiling: float | None = None
    """The same within the seconds in which the denoiser steps (for `diffusers`: in which its network runs)."""
    largest_difference: float = 0.0
    """Largest difference from the first side's images of the same requests, in [0, 1]."""
    mean_difference: float = 0.0
    """Mean difference over all values."""


class DiffusionScenario(LoadScenario, kw_only=True):
    """One load on every side."""

    size: int
    sides: dict[str, DiffusionSide]


class DiffusionResult(LoadResult, kw_only=True):
    benchmark: str = "diffusion"
    settings: DiffusionSettings
    scenarios: list[DiffusionScenario] = msgspec.field(default_factory=list)


def side_of(
    slices: Sequence[ImageSlice],
    first: Sequence[ImageSlice],
    ideal: float,
    pss_bytes: int,
    denoising: float | None = None,
) -> DiffusionSide:
    """The figures of one side from its slices. `first`: slices of the side it is compared with; `ideal`: seconds per
    step at the ceiling; `denoising`: seconds of the denoiser's steps, if the outcomes do not contain them."""
    outcomes, wall = outcomes_of(slices), wall_of(slices)
    steps = sum(one.steps for one in outcomes)
    denoising = denoising or sum(one.network for one in outcomes)
    counts = sorted({one.steps for one in outcomes})
    return DiffusionSide(
        requests=len(outcomes),
        wall=wall,
        by_round=[speed(taken, steps_of) for taken in slices],
        jct=summary([one.jct for one in outcomes]),
        first_preview=summary([one.first_preview for one in outcomes]),
        **differences(outcomes, outcomes_of(first)),
        images_per_second=len(outcomes) / wall,
        steps_per_second=steps / wall,
        jct_by_steps={count: summary([one.jct for one in outcomes if one.steps == count]) for count in counts},
        of_ceiling=steps * ideal / wall,
        network_of_ceiling=steps * ideal / denoising if denoising else None,
        pss_bytes=pss_bytes,
    )
