"""`segue bench omni`: compare Segue with `transformers` on Qwen2.5-Omni. `docs/benchmarks.md` explains the results."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from segue.bench.harness.hardware import machine
from segue.bench.harness.load import (
    LoadDriver,
    by_side,
    closed,
    in_turn,
    outcomes_of,
    serving,
    turn,
    warm_up,
)
from segue.bench.harness.meters import Watch, gpu_bytes_used
from segue.bench.harness.results import measure
from segue.bench.harness.stats import added, mean, snapshot
from segue.bench.omni.arguments import OmniBench
from segue.bench.omni.baseline import Options, baseline, baseline_process
from segue.bench.omni.outcome import OmniDriver, OmniSlice
from segue.bench.omni.results import (
    LevelResult,
    Result,
    Settings,
    agreement,
    baseline_stages,
    figures,
    hop_figures,
    ratios,
    segue_stages,
)
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


async def run(bench: OmniBench) -> Result:
    """Start every side, measure, stop every side."""
    found = machine()
    suppressed = Suppressed.of(read_config(bench.model_dir))
    # the library's random initialisation of the full shape is nearly silent
    silence = 0.0 if bench.loads == "dummy" else SILENCE
    workload = Workload(Material.read(bench.assets), bench.seed)
    segue = SegueDriver(
        bench.model_dir,
        suppressed,
        silence=silence,
        dtype=bench.computes,
        load_format=bench.loads,
        config=_deployment(bench),
    )
    process = baseline_process(_options(bench, suppressed, bench.threads or found.cores))
    baselines = {way: baseline(way, process, silence) for way in bench.baseline}
    gpu_before = gpu_bytes_used()
    async with serving([segue], bench.say):
        gpu_segue = gpu_bytes_used() - gpu_before
        async with serving(list(baselines.values())[:1], bench.say):  # all ways are one process's
            threads = {"segue": segue.threads()}
            if baselines:
                threads["transformers"] = {"process": (await process.start()).threads}
            result = Result(machine=found, settings=_settings(bench, threads, silence), levels=[])

            async def level(number: int, concurrency: int) -> None:
                # with one client a static batch is one request, so it is left out
                ways = [one for way, one in baselines.items() if way == "one" or concurrency > 1]
                result.levels.append(await _level(bench, workload, segue, ways, concurrency, number * LEVEL_SPACING))
                if found.gpus:
                    peak = 0 if process.last is None else process.last.gpu_bytes
                    result.gpu_peak_bytes = {"segue": gpu_segue, "transformers": peak}

            return await measure(result, [partial(level, *one) for one in enumerate(bench.concurrency)], bench.keep)


async def _level(
    bench: OmniBench,
    workload: Workload,
    segue: SegueDriver,
    baselines: Sequence[OmniDriver],
    concurrency: int,
    start: int,
) -> LevelResult:
    drivers: list[OmniDriver] = [segue, *baselines]
    load = closed(concurrency)
    bench.say(f"concurrency {concurrency}: warming up")
    # every kind at least once; indices outside the measured requests
    await warm_up(drivers, workload.requests(start + LEVEL_SPACING // 2, bench.warmup), load, concurrency)
    before = snapshot(segue.stats())
    everyone = [pid for driver in drivers for pid in driver.processes()]
    watches = {driver.name: Watch(driver.processes(), everyone) for driver in drivers}

    @asynccontextmanager
    async def watched(driver: LoadDriver[Any, Any], together: int) -> AsyncIterator[None]:
        async with turn(driver, together), watches[driver.name].watching():
            yield

    rounds = [workload.requests(start + number * bench.requests, bench.requests) for number in range(bench.rounds)]
    slices = by_side(await in_turn(drivers, rounds, load, concurrency, bench.say, _told, watched))
    # idle workers report; Segue goes first in a round, so that its last turn's report has arrived by now
    between = added(snapshot(segue.stats()), before)
    mine = slices[segue.name]
    theirs = {driver.name: slices[driver.name] for driver in baselines}
    outcomes = {name: outcomes_of(own) for name, own in slices.items()}
    return LevelResult(
        concurrency=concurrency,
        sides={name: figures(own) for name, own in slices.items()},
        ratios={name: ratios(mine, own) for name, own in theirs.items()},
        agreement={name: agreement(outcomes[segue.name], outcomes[name]) for name in theirs},
        stages={segue.name: segue_stages(between, mine)} | {name: baseline_stages(own) for name, own in theirs.items()},
        hops=hop_figures(between),
        usage={name: watch.usage for name, watch in watches.items()},
        batches={name: mean([one.batch for one in outcomes[name]]) for name in theirs},
        outcomes={
            name: [msgspec.structs.replace(outcome, text_ids=[], code_ids=[]) for outcome in own]
            for name, own in outcomes.items()
        },
    )


def _told(taken: OmniSlice) -> str:
    return f"{taken.wall:.1f} s, mean JCT {mean([outcome.jct for outcome in taken.outcomes]):.2f} s"


def _deployment(bench: OmniBench) -> Path | dict[str, object] | None:
    """A deployment for the requested device; a deployment file sets it itself. A baseline on the same GPU starts later,
    so Segue's caches, which by default fill 90% of the GPU together with the weights, are only as large as the load
    needs."""
    if bench.config is not None:
        return bench.config
    if bench.device != "cuda":
        return {"defaults": {"devices": ["cpu"]}}
    here: dict[str, object] = {"defaults": {"devices": ["cuda:0"]}}
    if bench.baseline:
        blocks = CLIENT_BLOCKS * max(FEWEST_CLIENTS, *bench.concurrency)
        here["stages"] = {name: {"kv_blocks": blocks} for name in ("thinker", "talker")}
    return here


def _options(bench: OmniBench, suppressed: Suppressed, threads: int) -> Options:
    return Options(
        model_dir=str(bench.model_dir),
        device="cuda:0" if bench.device == "cuda" else "cpu",
        dtype=bench.computes,
        load_format=bench.loads,
        threads=threads,
        suppressed_thinker=list(suppressed.thinker),
        suppressed_talker=list(suppressed.talker),
        talker_ends=list(suppressed.talker_ends),
    )


def _settings(bench: OmniBench, threads: dict[str, dict[str, int]], silence: float) -> Settings:
    return Settings(
        model=bench.model_dir.name,
        device=bench.device,
        dtype=bench.computes,
        load_format=bench.loads,
        seed=bench.seed,
        requests=bench.requests,
        rounds=bench.rounds,
        warmup=bench.warmup,
        sides=["segue", *bench.baseline],
        threads=threads,
        silence=silence,
        environment=WORKER_ENVIRONMENT,
    )
