"""`segue bench diffusion`: compare Segue with pipelines of `diffusers` on images (`docs/benchmarks.md`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from segue.bench.diffusion.arguments import DiffusionBench
from segue.bench.diffusion.reference import Answer, Loaded, Options
from segue.bench.diffusion.results import DiffusionResult, DiffusionScenario, DiffusionSettings, side_of
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
    steps_of,
)
from segue.bench.harness.hardware import machine
from segue.bench.harness.load import by_side, closed, in_turn, load_of, serving, warm_up
from segue.bench.harness.meters import memory
from segue.bench.harness.process import ChildProcess, ReferenceDriver, same_environment
from segue.bench.harness.results import Level, measure
from segue.bench.harness.scenarios import mean_jct, speed
from segue.models.registry import read_config

ONE, BATCH = "diffusers one at a time", "diffusers lists of prompts"
SPACING = 10_000
"""Index distance between scenarios, so that no request repeats."""
PREVIEWS = 2
"""Number of previews in the scenario that requests them."""
_WARM = Mix((2,), (1,))


def references(process: ChildProcess[ImageRequest, Loaded, Answer]) -> tuple[ImageDriver, ImageDriver]:
    """One image at a time, and lists of prompts as long as there are clients."""
    return ReferenceDriver(ONE, process, "one", _outcome), ReferenceDriver(BATCH, process, "lists", _outcome)


def _outcome(request: ImageRequest, answer: Answer, sent: float, came: float) -> ImageOutcome:
    return ImageOutcome(
        index=request.index,
        steps=request.steps,
        jct=came - sent,
        first_preview=came - sent,
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
        return await measure(result, Run(bench, result, loaded, segue, one, batch).levels(), bench.keep)


@dataclass
class Run:
    """A run of sides that are serving."""

    bench: DiffusionBench
    result: DiffusionResult
    loaded: Loaded
    """Of diffusers' process."""
    segue: SegueDriver
    one: ImageDriver
    batch: ImageDriver
    scenarios: int = 0

    def levels(self) -> list[Level]:
        """All requested levels."""
        bench, first = self.bench, self.bench.sizes[0]
        few, *_ = concurrency = sorted(bench.concurrency)
        made: list[Level] = [partial(self._closed, size, clients) for size in bench.sizes for clients in concurrency]
        made.append(partial(self._closed, first, few, previews=PREVIEWS))
        if bench.step_cache:
            made.append(partial(self._cached, first, concurrency[-1]))
        if bench.load:
            made.append(partial(self._open, first))
        return made

    async def _closed(self, size: int, clients: int, previews: int = 0) -> None:
        """`previews`: number of previews per image that Segue sends; `diffusers` has none."""
        name = f"{CLOSED}{f', {previews} previews' if previews else ''}"
        drivers: list[ImageDriver] = [self.segue, self.one, *([self.batch] if clients > 1 else [])]
        count = self.bench.requests if clients > 1 else max(2, self.bench.requests // 2)
        self.segue.previews = previews
        try:
            await self._scenario(drivers, name, CLOSED, size, count, clients)
        finally:
            self.segue.previews = 0

    async def _cached(self, size: int, clients: int) -> None:
        """Step caches against Segue's own exact images; their share of the ceiling counts the whole network's
        operations."""
        caches = [cached(self.segue, *one) for one in self.bench.step_cache]
        drivers: list[ImageDriver] = [self.segue, *caches, self.one]
        await self._scenario(drivers, f"{CACHED}, step caches", CACHED, size, self.bench.requests, clients)

    async def _open(self, size: int) -> None:
        """The arrival rate is derived from diffusers' speed with one client in the same run."""
        load, found = self.bench.load, self.result.scenarios
        alone = next((one for one in found if one.size == size and one.clients == 1), None)
        assert alone is not None, "arrivals need the closed loop of one client before them"
        rate = load * alone.sides[ONE].steps_per_second / OPEN.mean
        name = f"{rate:.3g} arrivals/s ({load:.0%} of what diffusers can do), {OPEN}"
        await self._scenario([self.segue, self.one], name, OPEN, size, self.bench.arrivals, 0, rate)

    async def _scenario(
        self,
        drivers: Sequence[ImageDriver],
        name: str,
        mix: Mix,
        size: int,
        count: int,
        clients: int,
        rate: float = 0.0,
    ) -> None:
        """`count`: requests per round; `clients`: 0 for arrivals at `rate`. Raises `WrongImage` if a rival's images
        differ from Segue's."""
        bench = self.bench
        crowd = [f"{clients} client{'s' if clients > 1 else ''}"] if clients else []
        name = ", ".join([f"{size} x {size}", *crowd, name])
        bench.say(name)
        together = clients or max(bench.concurrency)
        for driver in drivers:
            await warm_up([driver], self._take(_WARM, size, together), closed(together), together)
        rounds = [self._take(mix, size, count) for _ in range(bench.rounds)]
        before = self.segue.denoising()
        load = load_of(clients, rate, count, bench.seed)
        own = by_side(await in_turn(drivers, rounds, load, together, bench.say, _progress))
        # Segue goes first in a round, so that its last turn's reports have arrived by now
        denoising = self.segue.denoising() - before
        branches = 2 if bench.guidance > 1 else 1
        ideal = branches * self.loaded.flops[size] / self.loaded.ceiling
        held = {driver.name: memory(driver.processes())[0] for driver in drivers}
        segue, rivals = self.segue.name, {self.one.name, self.batch.name}
        # one denoiser served all sides of Segue, so its seconds cannot be attributed to one
        known = {segue: denoising} if len(own.keys() - rivals) == 1 else {}
        made = {side: side_of(taken, own[segue], ideal, held[side], known.get(side)) for side, taken in own.items()}
        for rival in made.keys() & rivals:
            found = round(255 * made[rival].largest_difference)
            if bench.most_difference is not None and found > bench.most_difference:
                raise WrongImage(
                    f"{name}: images of {rival} differ from Segue's by {found} of 255 levels; "
                    f"--most-difference allows {bench.most_difference}"
                )
        self.result.scenarios.append(DiffusionScenario(name=name, size=size, clients=clients, rate=rate, sides=made))

    def _take(self, mix: Mix, size: int, count: int) -> list[ImageRequest]:
        """Requests that no side has seen."""
        start, self.scenarios = SPACING * self.scenarios, self.scenarios + 1
        return images(mix, size, start, count, self.bench.guidance, self.bench.seed)


def _progress(taken: ImageSlice) -> str:
    return f"{speed(taken, steps_of):.2f} steps/s, {mean_jct(taken)}"
