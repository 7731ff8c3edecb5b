"""`segue bench diffusion --losses`: measure the gain and the error of each lossy optimisation against Segue's own exact
images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch

from segue.bench.diffusion.arguments import DiffusionBench
from segue.bench.diffusion.sides import SEGUE, ChangedDriver, ImageDriver, SegueDriver, cached, deployment
from segue.bench.diffusion.workload import CACHED, ImageOutcome, ImageRequest, Mix, differences, images
from segue.bench.harness.checkpoint import rank_of, write_gguf, write_untrained_lora
from segue.bench.harness.hardware import machine
from segue.bench.harness.load import ask, by_side, closed, in_turn, outcomes_of, serving
from segue.bench.harness.report import NamedColumns, page, table_by
from segue.bench.harness.results import Growing, now
from segue.bench.harness.scenarios import mean_jct
from segue.bench.harness.stats import mean
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.registry import read_config

TOGETHER = f"{SEGUE}, four at a time"
"""Exact images in other batches: shows the effect of rounding alone on the same requests."""
CACHES = (("first_block", 0.1), ("first_block", 1.0), ("teacache", None), ("taylorseer", None))
"""Step caches measured by default."""
QUANTIZATIONS = ("int8", "int4", "fp8")
GGUF_TYPES = ("Q8_0", "Q4_0")
INTERVAL = (0.2, 0.8)
"""Interval of the steps, as shares, within which guidance applies."""
_ADAPTER = "few"
_BATCH = 4
_WARM = Mix((4,), (1,))


@dataclass(frozen=True, slots=True)
class Ways:
    """The optimisations to measure; none is started."""

    same: list[ImageDriver]
    """Run on the exact Segue with changed requests."""
    own: list[ImageDriver]
    """Run with separate weights each."""
    refused: list[str]
    """Those that cannot be measured, with the reason."""


def faster_sides(exact: SegueDriver, bench: DiffusionBench, files: Path) -> Ways:
    """All lossy optimisations. `files`: a directory to write to."""
    network = exact.model_dir / ("transformer" if "transformer" in read_config(exact.model_dir) else "unet")
    distilled = bool(read_config(network).get("guidance_embeds"))
    same: list[ImageDriver] = [cached(exact, *cache) for cache in bench.step_cache or CACHES]
    if bench.guidance > 1 and not distilled:
        interval = f"guidance_interval {INTERVAL[0]:g}-{INTERVAL[1]:g}"
        same.append(ChangedDriver(interval, exact, guidance_interval=INTERVAL))
    # on a GPU bfloat16 is the dtype already
    kinds = QUANTIZATIONS if torch.cuda.is_available() else ("bfloat16", *QUANTIZATIONS)
    own: list[ImageDriver] = [exact.with_denoiser(kind, {"quantization": kind}) for kind in kinds]
    refused = []
    if find_spec("gguf") is None:
        refused.append(f"{SEGUE}, GGUF: needs the package gguf")
    else:
        for kind in GGUF_TYPES:
            file = files / f"{kind}.gguf"
            write_gguf(network, file, kind)
            own.append(exact.with_denoiser(f"GGUF {kind}", {"gguf": str(file)}))
    # an untrained adapter shows the speed of a trained one
    adapter, trained = files / "untrained.safetensors", "untrained "
    if bench.few_steps_lora is not None:
        adapter, trained = bench.few_steps_lora.resolve(), ""
    else:
        write_untrained_lora(network, adapter)
    # few steps are for no guidance; a distilled network's guidance scale is its input, and stays
    none: dict[str, Any] = {"true_cfg_scale": 1.0} if exact.true_cfg else {"guidance_scale": 0.0}
    own.append(
        exact.with_denoiser(
            f"{bench.few_steps} steps with {trained}LoRA",
            {"lora": {"adapters": {_ADAPTER: str(adapter)}, "max_rank": max(1, rank_of(adapter))}},
            adapter=_ADAPTER,
            num_inference_steps=bench.few_steps,
            **({} if distilled else none),
        )
    )
    return Ways(same, own, refused)


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


class LossResult(Growing, kw_only=True):
    benchmark: str = "losses"
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


async def run(bench: DiffusionBench) -> LossResult:
    """Start a Segue, measure all optimisations against it, stop it."""
    found, pipeline = machine(), read_config(bench.model_dir)["_class_name"]
    exact = SegueDriver(bench.model_dir, pipeline, bench.dtype, deployment(bench.config))
    size, count = bench.sizes[0], bench.requests
    [warm] = images(_WARM, size, 10**6, 1, bench.guidance, bench.seed)
    rounds = [images(CACHED, size, one * count, count, bench.guidance, bench.seed) for one in range(bench.rounds)]
    with TemporaryDirectory() as files:
        async with serving([exact], bench.say):
            await ask(exact, warm)
            ways = faster_sides(exact, bench, Path(files))
            sides, refused = await measured(exact, ways, warm, rounds, bench.say)
    result = LossResult(
        finished=now(),
        done=1,
        planned=1,
        machine=found,
        model=bench.model_dir.name,
        pipeline=pipeline,
        dtype=bench.dtype,
        size=size,
        steps=str(CACHED),
        images=count * bench.rounds,
        guidance=bench.guidance,
        seed=bench.seed,
        sides=sides,
        refused=refused,
    )
    bench.keep(result)
    return result


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

    async def compared(faster: Sequence[ImageDriver]) -> list[ImageOutcome]:
        slices = by_side(await in_turn([exact, *faster], asked, closed(1), 1, say, mean_jct))
        outcomes = {name: outcomes_of(own) for name, own in slices.items()}
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

    alone = await compared([way for way in ways.same if await serves(way)])
    for way in ways.own:
        say(f"starting {way.name}")
        try:
            if await serves(way):
                await compared([way])
        finally:
            await way.stop()
    together = await in_turn([exact], asked, closed(_BATCH), _BATCH, lambda line: None, mean_jct)
    made[TOGETHER] = loss(outcomes_of(together), alone)
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
        **differences(outcomes, exact),
    )


_COLUMNS: NamedColumns[LossSide] = {
    "seconds per image": lambda side, one: f"{one.seconds:.2f}",
    "speed": lambda side, one: "" if side == TOGETHER else f"{one.speed:.2f}×",
    "PSNR (dB)": lambda side, one: _decibels(one.psnr),
    "of the worst image (dB)": lambda side, one: _decibels(one.lowest_psnr),
    "difference, mean / largest": lambda side, one: f"{one.mean_difference:.4f} / {one.largest_difference:.4f}",
}


def markdown(result: LossResult) -> str:
    """The whole result, as a table."""
    return page(
        [
            f"## Losses: {result.pipeline} ({result.model}), {result.dtype}, {result.finished[:10]}",
            f"{result.machine.cores} cores of {result.machine.cpu}. {result.images} images of {result.size} x "
            f"{result.size}, {result.steps}, guidance {result.guidance:g}, seed {result.seed}; one client but for the "
            "last side.",
            table_by("side", result.sides, _COLUMNS),
            *(f"Not measured: {line}" for line in result.refused),
        ]
    )


def _decibels(value: float | None) -> str:
    return "equal" if value is None else f"{value:.1f}"


def _squared(mine: ImageOutcome, theirs: ImageOutcome) -> float:
    """Mean squared error of values in [0, 1]."""
    a, b = (np.frombuffer(one.image, np.uint8).astype(np.float64) / 255 for one in (mine, theirs))
    return float(((a - b) ** 2).mean())


def _psnr(squared: float) -> float | None:
    return None if squared == 0 else float(-10 * np.log10(squared))
