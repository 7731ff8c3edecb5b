"""`segue bench diffusion`: compare Segue with pipelines of `diffusers` on images (`docs/benchmarks.md`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from segue.bench.diffusion.results import (
    DiffusionResult,
    DiffusionScenario,
    DiffusionSettings,
    mean_jct,
    side_of,
)
from segue.bench.diffusion.sides import (
    BATCH,
    ONE,
    ImageDriver,
    ReferenceDriver,
    ReferenceProcess,
    SegueDriver,
    cached,
)
from segue.bench.diffusion.wire import Loaded, Options
from segue.bench.diffusion.workload import (
    CACHED,
    CLOSED,
    OPEN,
    ImageOutcome,
    ImageRequest,
    Mix,
    WrongImage,
    images,
)
from segue.bench.harness.child import same_environment
from segue.bench.harness.hardware import machine
from segue.bench.harness.load import Load, LoadSlice, arriving, closed, in_turn
from segue.bench.harness.load_results import Level, measure
from segue.bench.harness.meters import memory
from segue.bench.text.workload import poisson
from segue.models.registry import read_config

SPACING = 10_000
"""Index distance between scenarios, so that no request repeats."""
PREVIEWS = 2
"""Number of previews in the scenario that requests them."""


@dataclass(frozen=True, kw_only=True)
class DiffusionBench:
    """Settings of a run."""

    model_dir: Path
    sizes: Sequence[int]
    """Sizes of images, in pixels."""
    concurrency: Sequence[int]
    requests: int
    """Requests per round of a closed loop with several clients; half as many with one."""
    rounds: int
    load: float
    """Arrival rate as a share of diffusers' capacity one at a time; 0: not measured."""
    arrivals: int
    guidance: float
    most_difference: int
    """Maximum difference in 255 levels between images of Segue and of the rivals; more stops the benchmark. 255: not
    checked."""
    step_caches: Sequence[tuple[str, float | None]]
    """Name and threshold: each becomes a side of a separate scenario, next to Segue without a cache."""
    threads: int
    dtype: str
    seed: int
    config: Mapping[str, Any]
    """Segue's deployment."""
    keep: Callable[[DiffusionResult], None]
    """Receives the result so far after every level."""
    say: Callable[[str], None] = print


@dataclass
class Sides:
    segue: SegueDriver
    one: ReferenceDriver
    batch: ReferenceDriver
    process: ReferenceProcess
    scenarios: int = 0
    denoising: float = 0.0
    """Seconds of Segue's denoiser in the last measured scenario."""


async def run(bench: DiffusionBench) -> DiffusionResult:
    """Start every side, measure, stop every side."""
    found = machine()
    pipeline = read_config(bench.model_dir)["_class_name"]
    options = Options(model_dir=str(bench.model_dir), dtype=bench.dtype, threads=bench.threads, sizes=list(bench.sizes))
    process = ReferenceProcess(options, same_environment(bench.threads))
    segue = SegueDriver(bench.model_dir, pipeline, bench.dtype, bench.config)
    sides = Sides(segue, ReferenceDriver(ONE, process), ReferenceDriver(BATCH, process), process)
    async with AsyncExitStack() as stack:
        bench.say("starting diffusers")
        stack.push_async_callback(process.stop)
        loaded = await process.start()
        bench.say("starting segue")
        stack.push_async_callback(segue.stop)
        await segue.start()
        result = DiffusionResult(
            machine=found,
            settings=_settings(bench, pipeline, loaded),
            startup={driver.name: driver.startup for driver in (sides.segue, sides.one)},
        )
        await measure(result, levels(bench, sides, result, loaded), bench.keep)
    return result


def levels(bench: DiffusionBench, sides: Sides, result: DiffusionResult, loaded: Loaded) -> list[Level]:
    """All requested levels, on sides that are already serving."""
    made: list[Level] = [
        partial(_closed, bench, sides, result, loaded, size, clients)
        for size in bench.sizes
        for clients in bench.concurrency
    ]
    size, clients = bench.sizes[0], bench.concurrency[0]
    made.append(partial(_closed, bench, sides, result, loaded, size, clients, previews=PREVIEWS))
    if bench.step_caches:
        made.append(partial(_cached, bench, sides, result, loaded, size))
    if bench.load:
        made.append(partial(_open, bench, sides, result, loaded, size))
    return made


def _settings(bench: DiffusionBench, pipeline: str, loaded: Loaded) -> DiffusionSettings:
    return DiffusionSettings(
        model=bench.model_dir.name,
        pipeline=pipeline,
        dtype=bench.dtype,
        seed=bench.seed,
        rounds=bench.rounds,
        threads=bench.threads,
        guidance=bench.guidance,
        requests=bench.requests,
        environment=same_environment(bench.threads),
        versions=loaded.versions,
        ceiling=loaded.ceiling,
    )


async def _closed(
    bench: DiffusionBench,
    sides: Sides,
    result: DiffusionResult,
    loaded: Loaded,
    size: int,
    clients: int,
    *,
    previews: int = 0,
) -> None:
    """`previews`: number of previews per image that Segue sends; `diffusers` has none."""
    name = f"{size} x {size}, {clients} client{'s' if clients > 1 else ''}, {CLOSED}"
    if previews:
        name += f", {previews} previews"
    sides.segue.previews = previews
    drivers: list[ImageDriver] = [sides.segue, sides.one, *([sides.batch] if clients > 1 else [])]
    count = bench.requests if clients > 1 else max(2, bench.requests // 2)
    slices = await _measure(bench, sides, drivers, name, CLOSED, size, count, closed(clients), clients)
    result.scenarios.append(_scenario(bench, sides, drivers, slices, name, size, loaded, clients=clients))


async def _cached(bench: DiffusionBench, sides: Sides, result: DiffusionResult, loaded: Loaded, size: int) -> None:
    """Step caches against Segue's own exact images; their share of the ceiling counts the whole network's
    operations."""
    clients = max(bench.concurrency)
    name = f"{size} x {size}, {clients} client{'s' if clients > 1 else ''}, {CACHED}, step caches"
    sides.segue.previews = 0
    faster = [cached(sides.segue, *step_cache) for step_cache in bench.step_caches]
    drivers: list[ImageDriver] = [sides.segue, *faster, sides.one]
    slices = await _measure(bench, sides, drivers, name, CACHED, size, bench.requests, closed(clients), clients)
    result.scenarios.append(_scenario(bench, sides, drivers, slices, name, size, loaded, clients=clients))


async def _open(bench: DiffusionBench, sides: Sides, result: DiffusionResult, loaded: Loaded, size: int) -> None:
    """The arrival rate is derived from diffusers' speed with one client in the same run."""
    alone = next((one for one in result.scenarios if one.size == size and one.clients == 1), None)
    assert alone is not None, "arrivals need the closed loop of one client before them"
    rate = bench.load * alone.sides[ONE].steps_per_second / OPEN.mean
    name = f"{size} x {size}, {rate:.3g} arrivals/s ({bench.load:.0%} of what diffusers can do), {OPEN}"
    drivers: list[ImageDriver] = [sides.segue, sides.one]
    sides.segue.previews = 0
    load = arriving(poisson(rate, bench.arrivals, bench.seed))
    slices = await _measure(bench, sides, drivers, name, OPEN, size, bench.arrivals, load, max(bench.concurrency))
    result.scenarios.append(_scenario(bench, sides, drivers, slices, name, size, loaded, rate=rate))


async def _measure(
    bench: DiffusionBench,
    sides: Sides,
    drivers: Sequence[ImageDriver],
    name: str,
    mix: Mix,
    size: int,
    count: int,
    load: Load,
    together: int,
) -> list[LoadSlice[ImageOutcome]]:
    bench.say(name)
    warm = Mix((2,), (1,))

    def take(asked: Mix, number: int) -> list[ImageRequest]:
        start, sides.scenarios = SPACING * sides.scenarios, sides.scenarios + 1
        return images(asked, size, start, number, bench.guidance, bench.seed)

    for driver in drivers:
        await in_turn([driver], [take(warm, together)], closed(together), together, lambda line: None, _told)
    rounds = [take(mix, count) for _ in range(bench.rounds)]
    before = sides.segue.denoising()
    slices = await in_turn(drivers, rounds, load, together, bench.say, _told)
    # Segue goes first in a round, so that its last turn's reports have arrived by now
    sides.denoising = sides.segue.denoising() - before
    return slices


def _told(taken: LoadSlice[ImageOutcome]) -> str:
    steps = sum(one.steps for one in taken.outcomes)
    return f"{steps / taken.wall:.2f} steps/s, mean JCT {mean_jct(taken.outcomes):.2f} s"


def _scenario(
    bench: DiffusionBench,
    sides: Sides,
    drivers: Sequence[ImageDriver],
    slices: Sequence[LoadSlice[ImageOutcome]],
    name: str,
    size: int,
    loaded: Loaded,
    *,
    clients: int = 0,
    rate: float = 0.0,
) -> DiffusionScenario:
    own = {driver.name: [taken for taken in slices if taken.side == driver.name] for driver in drivers}
    branches = 2 if bench.guidance > 1 else 1
    ideal = branches * loaded.flops[size] / loaded.ceiling
    segue_bytes = memory(sides.segue.processes())[0]
    reference_bytes = memory([sides.process.pid])[0]
    held = {driver.name: segue_bytes for driver in drivers if not isinstance(driver, ReferenceDriver)}
    first = own[sides.segue.name]
    # one denoiser served all sides of Segue, so its seconds cannot be attributed to one
    known = {sides.segue.name: sides.denoising} if len(held) == 1 else {}
    made = {
        side: side_of(taken, first, ideal, held.get(side, reference_bytes), known.get(side))
        for side, taken in own.items()
    }
    for driver in drivers:
        found = round(255 * made[driver.name].largest_difference)
        if isinstance(driver, ReferenceDriver) and found > bench.most_difference:
            raise WrongImage(
                f"{name}: images of {driver.name} differ from Segue's by {found} of 255 levels; "
                f"--most-difference allows {bench.most_difference}"
            )
    return DiffusionScenario(name=name, size=size, clients=clients, rate=rate, sides=made)
