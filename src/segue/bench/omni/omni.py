"""`segue bench omni`: compare Segue with `transformers` on omni models. `docs/benchmarks.md` explains the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec.structs import replace as changed

from segue.bench.harness.hardware import machine
from segue.bench.harness.load import by_side, closed, in_turn, load_of, outcomes_of, serving, warm_up
from segue.bench.harness.meters import gpu_bytes_used, watched
from segue.bench.harness.results import measure
from segue.bench.harness.scenarios import mean_jct, ratios
from segue.bench.harness.stages import hop_figures
from segue.bench.harness.stats import added, mean, snapshot
from segue.bench.omni.arguments import OmniBench
from segue.bench.omni.baseline import STATIC_BATCH, Options, baseline, baseline_process
from segue.bench.omni.families import omni_family
from segue.bench.omni.outcome import OmniDriver, OmniSlice
from segue.bench.omni.paper import PaperWorkload
from segue.bench.omni.results import (
    METRICS,
    LevelResult,
    Result,
    Settings,
    agreement,
    baseline_stages,
    check_agreement,
    check_lengths,
    figures,
    load_name,
    segue_stages,
)
from segue.bench.omni.segue_driver import SegueDriver
from segue.bench.omni.workload import Material, Workload
from segue.models.registry import read_config
from segue.orchestrator.workers.placement import WORKER_ENVIRONMENT

LEVEL_SPACING = 1_000_000
"""Index distance between concurrencies, so that no request repeats and no cache has seen it."""
CLIENT_BLOCKS, FEWEST_CLIENTS = 128, 16
"""KV blocks per client, of 16 tokens each: a request with its answer has fewer than 1,000."""
SILENCE = 1e-4
"""Root mean square below which a waveform is silence (full scale is 1)."""
WORKLOADS = {kind.name: kind for kind in (Workload, PaperWorkload)}


async def run(bench: OmniBench) -> Result:
    """Start every side, measure, stop every side."""
    found = machine()
    config = read_config(bench.model_dir)
    family = omni_family(config, bench.model_dir)
    suppressed = family.suppressed(config)
    # the library's random initialisation of the full shape is nearly silent
    silence = 0.0 if bench.loads == "dummy" else SILENCE
    made = WORKLOADS[bench.workload]
    bench = replace(bench, requests=bench.requests or made.count)
    workload = made(Material.read(bench.assets), bench.seed, codes_per_token=family.codes_per_token)
    segue = SegueDriver(
        bench.model_dir,
        suppressed,
        silence=silence,
        dtype=bench.computes,
        load_format=bench.loads,
        unspoken_codes=family.unspoken_codes,
        config=_deployment(bench),
    )
    options = Options(
        model_dir=str(bench.model_dir),
        reference=family.reference,
        device="cuda:0" if bench.device == "cuda" else "cpu",
        dtype=bench.computes,
        load_format=bench.loads,
        threads=bench.threads or found.cores,
        suppressed_thinker=suppressed.thinker,
        suppressed_talker=suppressed.talker,
        talker_ends=suppressed.talker_ends,
    )
    process = baseline_process(options)
    baselines = {way: baseline(way, process, silence) for way in bench.baseline}
    gpu_before = gpu_bytes_used()
    async with serving([segue], bench.say):
        gpu_segue = gpu_bytes_used() - gpu_before
        async with serving(list(baselines.values())[:1], bench.say):  # all ways are one process's
            threads = {"segue": segue.threads()}
            if baselines:
                threads["transformers"] = {"process": (await process.start()).threads}
            settings = Settings(
                workload=bench.workload,
                model=bench.model_dir.name,
                dtype=bench.computes,
                load_format=bench.loads,
                device=bench.device,
                seed=bench.seed,
                rounds=bench.rounds,
                requests=bench.requests or 0,
                warmup=bench.warmup,
                sides=["segue", *bench.baseline],
                threads=threads,
                silence=silence,
                environment=WORKER_ENVIRONMENT,
            )
            result = Result(machine=found, settings=settings, levels=[])

            async def level(number: int, clients: int, rate: float) -> None:
                # with one client a static batch is one request, so it is left out
                ways = [one for way, one in baselines.items() if way == "one" or clients != 1]
                start = number * LEVEL_SPACING
                result.levels.append(await _level(bench, workload, segue, ways, clients, rate, start))
                if found.gpus:
                    peak = 0 if process.last is None else process.last.gpu_bytes
                    result.gpu_peak_bytes = {"segue": gpu_segue, "transformers": peak}

            loads = [*((clients, 0.0) for clients in bench.concurrency), *((0, rate) for rate in bench.rates)]
            levels = [partial(level, number, *load) for number, load in enumerate(loads)]
            return await measure(result, levels, bench.keep)


async def _level(
    bench: OmniBench,
    workload: Workload,
    segue: SegueDriver,
    baselines: Sequence[OmniDriver],
    clients: int,
    rate: float,
    start: int,
) -> LevelResult:
    """`clients`: of a closed loop; 0 for arrivals at `rate`. `start`: index of the first request."""
    count = bench.requests
    assert count is not None, "the workload says it"
    drivers: list[OmniDriver] = [segue, *baselines]
    together = clients or STATIC_BATCH
    bench.say(f"{load_name(clients, rate)}: warming up")
    # every kind at least once; indices outside the measured requests
    await warm_up(drivers, workload.requests(start + LEVEL_SPACING // 2, bench.warmup), closed(together), together)
    before = snapshot(segue.stats())
    its_turn, usage = watched(drivers)
    rounds = [workload.requests(start + number * count, count) for number in range(bench.rounds)]
    load = load_of(clients, rate, count, bench.seed)
    slices = by_side(await in_turn(drivers, rounds, load, together, bench.say, _progress, its_turn))
    # idle workers report; Segue goes first in a round, so that its last turn's report has arrived by now
    between = added(snapshot(segue.stats()), before)
    mine = slices[segue.name]
    theirs = {driver.name: slices[driver.name] for driver in baselines}
    outcomes = {name: outcomes_of(own) for name, own in slices.items()}
    agreed = {name: agreement(outcomes[segue.name], outcomes[name]) for name in theirs}
    for name in theirs:
        check_lengths(outcomes[segue.name], outcomes[name])
    if bench.computes == "float32" and bench.loads != "dummy":  # else the sides round, or draw their weights, apart
        check_agreement(agreed)
    return LevelResult(
        concurrency=clients,
        rate=rate,
        sides={name: figures(own) for name, own in slices.items()},
        ratios={name: ratios(mine, own, METRICS) for name, own in theirs.items()},
        agreement=agreed,
        stages={segue.name: segue_stages(between, mine)} | {name: baseline_stages(own) for name, own in theirs.items()},
        hops=hop_figures(between),
        usage=usage,
        batches={name: mean([one.batch for one in outcomes[name]]) for name in theirs},
        outcomes={name: [changed(one, text_ids=[], code_ids=[]) for one in own] for name, own in outcomes.items()},
    )


def _progress(taken: OmniSlice) -> str:
    return f"{taken.wall:.1f} s, {mean_jct(taken)}"


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
