"""`segue bench diffusion`: compare Segue with pipelines of `diffusers` on images (`docs/benchmarks.md`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from segue.bench.diffusion.arguments import DiffusionBench
from segue.bench.diffusion.reference import Answer, Loaded, Options
from segue.bench.diffusion.results import (
    DiffusionResult,
    DiffusionScenario,
    DiffusionSettings,
    mean_jct,
    side_of,
)
from segue.bench.diffusion.sides import ImageDriver, SegueDriver, cached, deployment
from segue.bench.diffusion.workload import (
    CACHED,
    CLOSED,
    OPEN,
    ImageOutcome,
    ImageRequest,
    ImageSlice,
    Mix,
    WrongImage,
    images,
)
from segue.bench.harness.hardware import machine
from segue.bench.harness.load import (
    Load,
    arriving,
    by_side,
    closed,
    in_turn,
    poisson,
    serving,
    warm_up,
)
from segue.bench.harness.meters import memory
from segue.bench.harness.process import ChildProcess, ReferenceDriver, same_environment
from segue.bench.harness.results import Level, measure
from segue.models.registry import read_config

ONE, BATCH = "diffusers one at a time", "diffusers lists of prompts"
SPACING = 10_000
"""Index distance between scenarios, so that no request repeats."""
PREVIEWS = 2
"""Number of previews in the scenario that requests them."""
_WARM = Mix((2,), (1,))


@dataclass
class Sides:
    segue: SegueDriver
    one: ImageDriver
    batch: ImageDriver
    loaded: Loaded
    """Of diffusers' process."""
    scenarios: int = 0


def references(process: ChildProcess[ImageRequest, Loaded, Answer]) -> tuple[ImageDriver, ImageDriver]:
    """One image at a time, and lists of prompts as long as there are clients."""
    return ReferenceDriver(ONE, process, "one", _outcome), ReferenceDriver(BATCH, process, "lists", _outcome)


def _outcome(request: ImageRequest, answer: Answer, sent: float, came: float) -> ImageOutcome:
    jct = came - sent
    return ImageOutcome(
        index=request.index,
        steps=request.steps,
        jct=jct,
        first_preview=jct,
        image=answer.image,
        network=answer.network,
    )


async def run(bench: DiffusionBench) -> DiffusionResult:
    """Start every side, measure, stop every side."""
    found = machine()
    pipeline = read_config(bench.model_dir)["_class_name"]
    options = Options(model_dir=str(bench.model_dir), dtype=bench.dtype, threads=bench.threads, sizes=list(bench.sizes))
    environment = same_environment(bench.threads)
    process: ChildProcess[ImageRequest, Loaded, Answer] = ChildProcess(
        "diffusers", "segue.bench.diffusion.reference", options, Loaded, Answer, environment
    )
    segue = SegueDriver(bench.model_dir, pipeline, bench.dtype, deployment(bench.config))
    one, batch = references(process)
    async with serving([one, segue], bench.say):
        loaded = await process.start()
        settings = DiffusionSettings(
            model=bench.model_dir.name,
            pipeline=pipeline,
            dtype=bench.dtype,
            seed=bench.seed,
            rounds=bench.rounds,
            threads=bench.threads,
            guidance=bench.guidance,
            requests=bench.requests,
            environment=environment,
            versions=loaded.versions,
            ceiling=loaded.ceiling,
        )
        startup = {driver.name: driver.startup for driver in (segue, one)}
        result = DiffusionResult(machine=found, settings=settings, startup=startup)
        return await measure(result, levels(bench, Sides(segue, one, batch, loaded), result), bench.keep)


def levels(bench: DiffusionBench, sides: Sides, result: DiffusionResult) -> list[Level]:
    """All requested levels, on sides that are already serving."""
    few, *_ = concurrency = sorted(bench.concurrency)
    first = bench.sizes[0]
    made: list[Level] = [
        partial(_closed, bench, sides, result, size, clients) for size in bench.sizes for clients in concurrency
    ]
    made.append(partial(_closed, bench, sides, result, first, few, previews=PREVIEWS))
    if bench.step_cache:
        made.append(partial(_cached, bench, sides, result, first, concurrency[-1]))
    if bench.load:
        made.append(partial(_open, bench, sides, result, first))
    return made


async def _closed(
    bench: DiffusionBench, sides: Sides, result: DiffusionResult, size: int, clients: int, *, previews: int = 0
) -> None:
    """`previews`: number of previews per image that Segue sends; `diffusers` has none."""
    name = f"{_clients(size, clients)}, {CLOSED}{f', {previews} previews' if previews else ''}"
    drivers: list[ImageDriver] = [sides.segue, sides.one, *([sides.batch] if clients > 1 else [])]
    count = bench.requests if clients > 1 else max(2, bench.requests // 2)
    sides.segue.previews = previews
    try:
        await _scenario(bench, sides, result, drivers, name, CLOSED, size, count, closed(clients), clients)
    finally:
        sides.segue.previews = 0


async def _cached(bench: DiffusionBench, sides: Sides, result: DiffusionResult, size: int, clients: int) -> None:
    """Step caches against Segue's own exact images; their share of the ceiling counts the whole network's
    operations."""
    name = f"{_clients(size, clients)}, {CACHED}, step caches"
    drivers: list[ImageDriver] = [sides.segue, *(cached(sides.segue, *one) for one in bench.step_cache), sides.one]
    await _scenario(bench, sides, result, drivers, name, CACHED, size, bench.requests, closed(clients), clients)


async def _open(bench: DiffusionBench, sides: Sides, result: DiffusionResult, size: int) -> None:
    """The arrival rate is derived from diffusers' speed with one client in the same run."""
    alone = next((one for one in result.scenarios if one.size == size and one.clients == 1), None)
    assert alone is not None, "arrivals need the closed loop of one client before them"
    rate = bench.load * alone.sides[ONE].steps_per_second / OPEN.mean
    name = f"{size} x {size}, {rate:.3g} arrivals/s ({bench.load:.0%} of what diffusers can do), {OPEN}"
    load = arriving(poisson(rate, bench.arrivals, bench.seed))
    drivers: list[ImageDriver] = [sides.segue, sides.one]
    await _scenario(bench, sides, result, drivers, name, OPEN, size, bench.arrivals, load, rate=rate)


def _clients(size: int, clients: int) -> str:
    return f"{size} x {size}, {clients} client{'s' if clients > 1 else ''}"


async def _scenario(
    bench: DiffusionBench,
    sides: Sides,
    result: DiffusionResult,
    drivers: Sequence[ImageDriver],
    name: str,
    mix: Mix,
    size: int,
    count: int,
    load: Load,
    clients: int = 0,
    *,
    rate: float = 0.0,
) -> None:
    """`count`: requests per round; `clients`: 0 for arrivals at `rate`. Raises `WrongImage` if a rival's images differ
    from Segue's."""
    bench.say(name)
    together = clients or max(bench.concurrency)

    def take(asked: Mix, number: int) -> list[ImageRequest]:
        start, sides.scenarios = SPACING * sides.scenarios, sides.scenarios + 1
        return images(asked, size, start, number, bench.guidance, bench.seed)

    for driver in drivers:
        await warm_up([driver], take(_WARM, together), closed(together), together)
    rounds = [take(mix, count) for _ in range(bench.rounds)]
    before = sides.segue.denoising()
    own = by_side(await in_turn(drivers, rounds, load, together, bench.say, _summary))
    # Segue goes first in a round, so that its last turn's reports have arrived by now
    denoising = sides.segue.denoising() - before
    branches = 2 if bench.guidance > 1 else 1
    ideal = branches * sides.loaded.flops[size] / sides.loaded.ceiling
    held = {driver.name: memory(driver.processes())[0] for driver in drivers}
    rivals = {sides.one.name, sides.batch.name}
    # one denoiser served all sides of Segue, so its seconds cannot be attributed to one
    known = {sides.segue.name: denoising} if len(own.keys() - rivals) == 1 else {}
    made = {
        side: side_of(taken, own[sides.segue.name], ideal, held[side], known.get(side)) for side, taken in own.items()
    }
    for rival in made.keys() & rivals:
        found = round(255 * made[rival].largest_difference)
        if bench.most_difference is not None and found > bench.most_difference:
            raise WrongImage(
                f"{name}: images of {rival} differ from Segue's by {found} of 255 levels; "
                f"--most-difference allows {bench.most_difference}"
            )
    result.scenarios.append(DiffusionScenario(name=name, size=size, clients=clients, rate=rate, sides=made))


def _summary(taken: ImageSlice) -> str:
    steps = sum(one.steps for one in taken.outcomes)
    return f"{steps / taken.wall:.2f} steps/s, mean JCT {mean_jct(taken.outcomes):.2f} s"
