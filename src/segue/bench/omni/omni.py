"""`segue bench omni`: compare Segue with `transformers` on Qwen2.5-Omni. `docs/benchmarks.md` explains the results."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from segue.bench.harness.hardware import machine
from segue.bench.harness.load import LoadDriver, closed, in_turn, turn
from segue.bench.harness.load_results import measure
from segue.bench.harness.meters import SideUsage, Watch, gpu_bytes_used
from segue.bench.harness.stats import METRICS, agreement, figures, ratio
from segue.bench.omni.baseline import BaselineDriver, BaselineProcess, Options
from segue.bench.omni.outcome import OmniDriver, OmniSlice
from segue.bench.omni.profile import Snapshot, added, baseline_stages, hop_figures, segue_stages, snapshot
from segue.bench.omni.results import LevelResult, Result, Settings
from segue.bench.omni.segue_driver import SegueDriver
from segue.bench.omni.workload import Material, Suppressed, Workload
from segue.models.registry import read_config
from segue.orchestrator.placement import WORKER_ENVIRONMENT

LEVEL_SPACING = 1_000_000
"""Index distance between concurrencies, so that no request repeats and no cache has seen it."""
CLIENT_BLOCKS, FEWEST_CLIENTS = 128, 16
"""KV blocks per client, of 16 tokens each: a request with its answer has fewer than 1,000."""
SILENCE = 1e-4
"""Root mean square below which a waveform is silence (full scale is 1)."""


@dataclass(frozen=True, kw_only=True)
class OmniBench:
    """Settings of a run."""

    model_dir: Path
    assets: Path
    concurrency: Sequence[int]
    requests: int
    rounds: int
    warmup: int
    baselines: Sequence[str]
    """Any of `one` and `static`."""
    dtype: str
    device: str
    load_format: str
    seed: int
    config: Path | None = None
    """Segue's deployment file."""
    threads: int | None = None
    """CPU threads of the baseline; None: the number of cores."""
    keep: Callable[[Result], None]
    """Receives the result so far after every level."""
    say: Callable[[str], None] = print


async def run(bench: OmniBench) -> Result:
    """Start every side, measure, stop every side."""
    found = machine()
    suppressed = Suppressed.of(read_config(bench.model_dir))
    # the library's random initialisation of the full shape is nearly silent
    silence = 0.0 if bench.load_format == "dummy" else SILENCE
    workload = Workload(Material.read(bench.assets), bench.seed)
    segue = SegueDriver(
        bench.model_dir,
        suppressed,
        silence=silence,
        dtype=bench.dtype,
        load_format=bench.load_format,
        config=_deployment(bench),
    )
    process = BaselineProcess(_options(bench, suppressed, bench.threads or found.cores))
    threads: dict[str, dict[str, int]] = {}
    gpu_before = gpu_bytes_used()
    async with AsyncExitStack() as stack:
        bench.say("starting segue")
        stack.push_async_callback(segue.stop)
        await segue.start()
        threads["segue"] = segue.threads()
        gpu_segue = gpu_bytes_used() - gpu_before
        if bench.baselines:
            bench.say("starting transformers")
            stack.push_async_callback(process.stop)
            threads["transformers"] = {"process": (await process.start()).threads}
        result = Result(machine=found, settings=_settings(bench, threads, silence), levels=[])

        async def level(number: int, concurrency: int) -> None:
            sides = _Sides(segue, process, _baselines(bench, process, concurrency, silence))
            result.levels.append(await _level(bench, workload, sides, concurrency, number * LEVEL_SPACING))
            if found.gpus:
                result.gpu_peak_bytes = {"segue": gpu_segue, "transformers": process.gpu_bytes}

        await measure(result, [partial(level, *one) for one in enumerate(bench.concurrency)], bench.keep)
    return result


@dataclass(frozen=True)
class _Sides:
    segue: SegueDriver
    process: BaselineProcess
    baselines: list[BaselineDriver]

    @property
    def all(self) -> list[OmniDriver]:
        return [self.segue, *self.baselines]


async def _level(bench: OmniBench, workload: Workload, sides: _Sides, concurrency: int, start: int) -> LevelResult:
    load = closed(concurrency)
    for driver in sides.all:
        bench.say(f"concurrency {concurrency}: warming up {driver.name}")
        async with turn(driver, concurrency):
            # every kind at least once; indices outside the measured requests
            await load(driver, workload.requests(start + LEVEL_SPACING // 2, bench.warmup))
    before = snapshot(sides.segue.stats())
    everyone = [pid for driver in sides.all for pid in driver.processes()]
    watches = {driver.name: Watch(driver.processes(), everyone) for driver in sides.all}

    @asynccontextmanager
    async def watched(driver: LoadDriver[Any, Any], together: int) -> AsyncIterator[None]:
        async with turn(driver, together):
            watches[driver.name].begin()
            try:
                yield
            finally:
                await watches[driver.name].end()

    rounds = [workload.requests(start + number * bench.requests, bench.requests) for number in range(bench.rounds)]
    slices = await in_turn(sides.all, rounds, load, concurrency, bench.say, _told, watched)
    # idle workers report; Segue goes first in a round, so that its last turn's report has arrived by now
    between = added(snapshot(sides.segue.stats()), before)
    usage = {name: watch.usage for name, watch in watches.items()}
    return _result(concurrency, sides, slices, between, usage)


def _told(taken: OmniSlice) -> str:
    return f"{taken.wall:.1f} s, mean JCT {statistics.mean(outcome.jct for outcome in taken.outcomes):.2f} s"


def _result(
    concurrency: int, sides: _Sides, slices: list[OmniSlice], between: Snapshot, usage: dict[str, SideUsage]
) -> LevelResult:
    by_side = {driver.name: [taken for taken in slices if taken.side == driver.name] for driver in sides.all}
    outcomes = {name: [o for taken in own for o in taken.outcomes] for name, own in by_side.items()}
    mine = by_side[sides.segue.name]
    ratios = {
        baseline.name: {metric: ratio(mine, by_side[baseline.name], of) for metric, of in METRICS.items()}
        for baseline in sides.baselines
    }
    stages = {baseline.name: baseline_stages(by_side[baseline.name]) for baseline in sides.baselines}
    return LevelResult(
        concurrency=concurrency,
        sides={name: figures(own) for name, own in by_side.items()},
        ratios=ratios,
        agreement={b.name: agreement(outcomes[sides.segue.name], outcomes[b.name]) for b in sides.baselines},
        stages={sides.segue.name: segue_stages(between, mine), **stages},
        hops=hop_figures(between),
        usage=usage,
        batches={b.name: statistics.mean(o.batch for o in outcomes[b.name]) for b in sides.baselines},
        outcomes={
            name: [msgspec.structs.replace(outcome, text_ids=[], code_ids=[]) for outcome in own]
            for name, own in outcomes.items()
        },
    )


def _baselines(bench: OmniBench, process: BaselineProcess, concurrency: int, silence: float) -> list[BaselineDriver]:
    """The baselines for a level. With one client a static batch is one request, so it is left out."""
    return [BaselineDriver(way, process, silence) for way in bench.baselines if way == "one" or concurrency > 1]


def _deployment(bench: OmniBench) -> Path | dict[str, object] | None:
    """A deployment for the requested device; a deployment file sets it itself. A baseline on the same GPU starts later,
    so Segue's caches, which by default fill 90% of the GPU together with the weights, are only as large as the load
    needs."""
    if bench.config is not None:
        return bench.config
    if bench.device != "cuda":
        return {"defaults": {"devices": ["cpu"]}}
    here: dict[str, object] = {"defaults": {"devices": ["cuda:0"]}}
    if bench.baselines:
        blocks = CLIENT_BLOCKS * max(FEWEST_CLIENTS, *bench.concurrency)
        here["stages"] = {name: {"kv_blocks": blocks} for name in ("thinker", "talker")}
    return here


def _options(bench: OmniBench, suppressed: Suppressed, threads: int) -> Options:
    return Options(
        model_dir=str(bench.model_dir),
        device="cuda:0" if bench.device == "cuda" else "cpu",
        dtype=bench.dtype,
        load_format=bench.load_format,
        threads=threads,
        suppressed_thinker=list(suppressed.thinker),
        suppressed_talker=list(suppressed.talker),
        talker_ends=list(suppressed.talker_ends),
    )


def _settings(bench: OmniBench, threads: dict[str, dict[str, int]], silence: float) -> Settings:
    return Settings(
        model=bench.model_dir.name,
        device=bench.device,
        dtype=bench.dtype,
        load_format=bench.load_format,
        seed=bench.seed,
        requests=bench.requests,
        rounds=bench.rounds,
        warmup=bench.warmup,
        sides=["segue", *bench.baselines],
        threads=threads,
        silence=silence,
        environment=WORKER_ENVIRONMENT,
    )
