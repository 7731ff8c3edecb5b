"""`segue bench diffusion --losses`: measure the gain and the error of each lossy optimisation against Segue's own exact
images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from segue.bench.diffusion.loss_sides import FewSteps, Ways, faster_sides
from segue.bench.diffusion.sides import SEGUE, ImageDriver, SegueDriver
from segue.bench.diffusion.workload import (
    CACHED,
    ImageOutcome,
    ImageRequest,
    Mix,
    images,
    largest_difference,
    mean_difference,
)
from segue.bench.harness.hardware import Machine, machine
from segue.bench.harness.load import LoadSlice, ask, closed, in_turn
from segue.bench.harness.load_report import table
from segue.bench.harness.result_file import VERSION
from segue.bench.harness.stats import mean
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.registry import read_config

TOGETHER = f"{SEGUE}, four at a time"
"""Exact images in other batches: shows the effect of rounding alone on the same requests."""
_BATCH = 4
_WARM = Mix((4,), (1,))


@dataclass(frozen=True, kw_only=True)
class LossBench:
    """Settings of a run."""

    model_dir: Path
    size: int
    requests: int
    """Requests per round, one after the other."""
    rounds: int
    guidance: float
    step_caches: Sequence[tuple[str, float | None]]
    few_steps: FewSteps
    dtype: str
    seed: int
    config: Mapping[str, Any]
    say: Callable[[str], None] = print


class LossSide(msgspec.Struct, kw_only=True):
    """The figures of one way to compute the same images."""

    seconds: float
    """Mean seconds per image, one client."""
    speed: float
    """The exact side's seconds, measured next to it, divided by these."""
    psnr: float | None
    """Peak signal-to-noise ratio against the exact images in dB, over all their values; None: they are equal."""
    lowest_psnr: float | None
    """The ratio of the worst image."""
    mean_difference: float
    """Mean difference of values in [0, 1]."""
    largest_difference: float


class LossResult(msgspec.Struct, kw_only=True):
    version: int = VERSION
    benchmark: str = "losses"
    finished: str
    """ISO 8601, UTC."""
    machine: Machine
    model: str
    pipeline: str
    dtype: str
    size: int
    steps: str
    """Numbers of steps and their shares, in words."""
    images: int
    guidance: float
    seed: int
    sides: dict[str, LossSide]
    """The exact side first."""
    refused: list[str]
    """Optimisations that the model does not support, with the reason."""


async def run(bench: LossBench) -> LossResult:
    """Start a Segue, measure all optimisations against it, stop it."""
    found, pipeline = machine(), read_config(bench.model_dir)["_class_name"]
    exact = SegueDriver(bench.model_dir, pipeline, bench.dtype, bench.config)
    warm, asked = requests_of(bench)
    async with AsyncExitStack() as stack:
        files = Path(stack.enter_context(TemporaryDirectory()))
        stack.push_async_callback(exact.stop)
        await exact.start()
        await ask(exact, warm)
        ways = faster_sides(exact, bench.step_caches, bench.guidance, bench.few_steps, files)
        sides, refused = await measured(exact, ways, warm, asked, bench.say)
    return LossResult(
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=found,
        model=bench.model_dir.name,
        pipeline=pipeline,
        dtype=bench.dtype,
        size=bench.size,
        steps=str(CACHED),
        images=bench.requests * bench.rounds,
        guidance=bench.guidance,
        seed=bench.seed,
        sides=sides,
        refused=refused,
    )


def requests_of(bench: LossBench) -> tuple[ImageRequest, list[list[ImageRequest]]]:
    """One request to warm a side up, and those of each round."""
    [warm] = images(_WARM, bench.size, 10**6, 1, bench.guidance, bench.seed)
    count = bench.requests
    return warm, [
        images(CACHED, bench.size, number * count, count, bench.guidance, bench.seed) for number in range(bench.rounds)
    ]


async def measured(
    exact: ImageDriver,
    ways: Ways,
    warm: ImageRequest,
    asked: Sequence[Sequence[ImageRequest]],
    say: Callable[[str], None],
) -> tuple[dict[str, LossSide], list[str]]:
    """Measure all optimisations in turn with `exact`, which is serving; also returns those that could not be measured.

    Sides with separate weights are started one at a time, so that at most two models are in memory. Each is measured
    next to `exact`, so that a slow minute of the machine affects both.
    """
    refused = list(ways.refused)
    made: dict[str, LossSide] = {}

    async def beside(faster: Sequence[ImageDriver]) -> list[ImageOutcome]:
        slices = await in_turn([exact, *faster], asked, closed(1), 1, say, _told)
        outcomes = {driver.name: _outcomes(slices, driver.name) for driver in (exact, *faster)}
        for name, theirs in outcomes.items():
            made.setdefault(name, loss(theirs, outcomes[exact.name]))
        return outcomes[exact.name]

    async def serves(way: ImageDriver) -> bool:
        try:
            await way.start()
            await ask(way, warm)
        except (ConfigError, InvalidRequest) as error:
            refused.append(f"{way.name}: {error}")
            return False
        return True

    alone = await beside([way for way in ways.same if await serves(way)])
    for way in ways.own:
        say(f"starting {way.name}")
        try:
            if await serves(way):
                await beside([way])
        finally:
            await way.stop()
    together = await in_turn([exact], asked, closed(_BATCH), _BATCH, lambda line: None, _told)
    made[TOGETHER] = loss(_outcomes(together, exact.name), alone)
    return made, refused


def loss(outcomes: Sequence[ImageOutcome], exact: Sequence[ImageOutcome]) -> LossSide:
    """The figures of a side from outcomes of the same requests."""
    errors = [_squared(mine, theirs) for mine, theirs in zip(outcomes, exact, strict=True)]
    seconds = mean([one.jct for one in outcomes])
    return LossSide(
        seconds=seconds,
        speed=mean([one.jct for one in exact]) / seconds,
        psnr=_psnr(mean(errors)),
        lowest_psnr=_psnr(max(errors)),
        mean_difference=mean_difference(outcomes, exact),
        largest_difference=largest_difference(outcomes, exact),
    )


def markdown(result: LossResult) -> str:
    """The whole result, as a table."""
    rows = [
        [
            side,
            f"{figures.seconds:.2f}",
            "" if side == TOGETHER else f"{figures.speed:.2f}×",
            "equal" if figures.psnr is None else f"{figures.psnr:.1f}",
            "equal" if figures.lowest_psnr is None else f"{figures.lowest_psnr:.1f}",
            f"{figures.mean_difference:.4f} / {figures.largest_difference:.4f}",
        ]
        for side, figures in result.sides.items()
    ]
    head = ["side", "seconds per image", "speed", "PSNR (dB)", "of the worst image (dB)"]
    parts = [
        f"## Losses: {result.pipeline} ({result.model}), {result.dtype}, {result.finished[:10]}",
        f"{result.machine.cores} cores of {result.machine.cpu}. {result.images} images of {result.size} x "
        f"{result.size}, {result.steps}, guidance {result.guidance:g}, seed {result.seed}; one client but for the last "
        "side.",
        table([*head, "difference, mean / largest"], rows),
        *(f"Not measured: {line}" for line in result.refused),
    ]
    return "\n\n".join(parts) + "\n"


def _outcomes(slices: Sequence[LoadSlice[ImageOutcome]], side: str) -> list[ImageOutcome]:
    return [one for taken in slices if taken.side == side for one in taken.outcomes]


def _squared(mine: ImageOutcome, theirs: ImageOutcome) -> float:
    """Mean squared error of values in [0, 1]."""
    a, b = (np.frombuffer(one.image, np.uint8).astype(np.float64) / 255 for one in (mine, theirs))
    return float(((a - b) ** 2).mean())


def _psnr(squared: float) -> float | None:
    return None if squared == 0 else float(-10 * np.log10(squared))


def _told(taken: LoadSlice[ImageOutcome]) -> str:
    return f"mean JCT {mean([one.jct for one in taken.outcomes]):.2f} s"
