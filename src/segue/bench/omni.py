"""`segue bench omni`: Segue against `transformers` on Qwen2.5-Omni. `docs/benchmarks.md` says how to read it."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from segue.bench.baseline import BaselineDriver, BaselineProcess
from segue.bench.baseline_wire import Options
from segue.bench.hardware import machine
from segue.bench.load import LoadDriver, closed, in_turn, turn
from segue.bench.load_results import measure
from segue.bench.meters import SideUsage, Watch, gpu_bytes_used
from segue.bench.outcome import OmniDriver, OmniSlice
from segue.bench.profile import Snapshot, added, baseline_stages, hop_figures, segue_stages, snapshot
from segue.bench.results import LevelResult, Result, Settings
from segue.bench.segue_driver import SegueDriver
from segue.bench.stats import METRICS, agreement, figures, ratio
from segue.bench.workload import Material, Suppressed, Workload
from segue.models.registry import read_config

LEVEL_SPACING = 1_000_000
"""Indices of different concurrencies are so far apart: no request comes twice, so no cache knows it."""
SILENCE = 1e-4
"""Root mean square of the waveform below which it is silence (full scale is 1)."""


@dataclass(frozen=True, kw_only=True)
class OmniBench:
    """What to run."""

    model_dir: Path
    assets: Path
    concurrency: Sequence[int]
    requests: int
    rounds: int
    warmup: int
    baselines: Sequence[str]
    """Of `one` and `static`."""
    dtype: str
    device: str
    load_format: str
    seed: int
    config: Path | None = None
    """Deployment file of Segue."""
    threads: int | None = None
    """CPU threads of the baseline; None: as many as cores."""
    keep: Callable[[Result], None]
    """Called with the result so far after every level."""
    say: Callable[[str], None] = print


async def run(bench: OmniBench) -> Result:
    """Start every side, measure, stop every side."""
    found = machine()
    suppressed = Suppressed.of(read_config(bench.model_dir))
    # random weights of the full shape, as the library initialises them, are next to silent
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

    def processes(self, driver: OmniDriver) -> dict[int, str]:
        return self.segue.processes() if driver is self.segue else {self.process.pid: "process"}


async def _level(bench: OmniBench, workload: Workload, sides: _Sides, concurrency: int, start: int) -> LevelResult:
    load = closed(concurrency)
    for driver in sides.all:
        bench.say(f"concurrency {concurrency}: warming up {driver.name}")
        async with turn(driver, concurrency):
            # every kind at least once; away from the measured requests
            await load(driver, workload.requests(start + LEVEL_SPACING // 2, bench.warmup))
    before = snapshot(sides.segue.stats())
    everyone = [pid for driver in sides.all for pid in sides.processes(driver)]
    watches = {driver.name: Watch(sides.processes(driver), everyone) for driver in sides.all}

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
    # workers report when they fall idle; Segue goes first in a round, so that its last turn is long reported by now
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
    """With one client at a time, a static batch is one request: it is left out."""
    return [BaselineDriver(way, process, silence) for way in bench.baselines if way == "one" or concurrency > 1]


def _deployment(bench: OmniBench) -> Path | dict[str, object] | None:
    """Segue on the device that was asked for; a deployment file says it by itself."""
    if bench.config is not None:
        return bench.config
    return {"defaults": {"devices": ["cuda:0" if bench.device == "cuda" else "cpu"]}}


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
    )
