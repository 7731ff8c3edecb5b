"""`segue bench hosts`: what it costs to leave one machine."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from segue.bench.harness.hardware import machine
from segue.bench.harness.load import by_side, closed, in_turn, outcomes_of, serving, warm_up
from segue.bench.harness.process import python_path
from segue.bench.harness.results import Level, measure
from segue.bench.harness.stats import mean, ratio, summary
from segue.bench.hosts import hops
from segue.bench.hosts.arguments import HostsBench
from segue.bench.hosts.limit import Asked
from segue.bench.hosts.results import HostsResult, JctRow, LimitRow, LossRow, size_of
from segue.bench.hosts.serving import HostsDriver, sides
from segue.bench.omni.families import omni_family
from segue.bench.omni.outcome import OmniSlice, Outcome
from segue.bench.omni.workload import Material, Workload
from segue.messages.errors import StageFailed
from segue.models.registry import read_config

SPACING = 1_000_000
"""Index distance between levels, so that no request repeats and no cache has seen it."""


async def run(bench: HostsBench) -> HostsResult:
    """Measure every part that is asked for."""
    result = HostsResult(
        machine=machine(),
        network=bench.hosts.said,
        model="" if bench.model is None else bench.model_dir.name,
        requests=bench.requests,
        rounds=bench.rounds,
        hop_rounds=bench.hop_rounds,
    )
    logs = bench.path.with_suffix("").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    levels: list[Level] = []
    if "hops" in bench.parts:
        levels.append(partial(_hops, bench, result, logs))
    if "jct" in bench.parts:
        levels.append(partial(_jct, bench, result, logs))
    if "loss" in bench.parts:
        levels.append(partial(_loss, bench, result, logs))
    if "limit" in bench.parts:
        largest = max(bench.simulated)
        asked = [(workers, bench.steps[0]) for workers in bench.simulated]
        asked += [(largest, steps) for steps in bench.steps[1:]]
        levels += [partial(_limit, bench, result, *one) for one in asked]
    return await measure(result, levels, bench.keep)


async def _hops(bench: HostsBench, result: HostsResult, logs: Path) -> None:
    sizes = [1024 * kib for kib in bench.kib]
    for row in hops.measure(bench.hosts, sizes, bench.hop_rounds, hops.usable(bench.hosts), logs):
        bench.say(f"{size_of(row.bytes)}, {row.way}: {row.median_ms:.2f} ms")
        result.hops.append(row)


# ── a model over two hosts ───────────────────────────────────────────────────────────────────────────────────────────


def _driver(bench: HostsBench, logs: Path, name: str, workers: int, nodes: Sequence[str]) -> HostsDriver:
    family = omni_family(read_config(bench.model_dir), bench.model_dir)
    most = max(bench.concurrency)
    where = bench.hosts
    return HostsDriver(name, bench.model_dir, family, where, logs, workers=workers, nodes=nodes, clients=most)


def _workload(bench: HostsBench) -> Workload:
    family = omni_family(read_config(bench.model_dir), bench.model_dir)
    return Workload(Material.read(bench.assets), bench.seed, codes_per_token=family.codes_per_token)


def _summary(taken: OmniSlice) -> str:
    return f"{taken.wall:.1f} s, mean JCT {mean([one.jct for one in taken.outcomes]):.2f} s"


def _equal(pairs: Sequence[tuple[Outcome, Outcome]]) -> float:
    """The share of pairs with the same reply and codes."""
    return mean([float((a.text_ids, a.code_ids) == (b.text_ids, b.code_ids)) for a, b in pairs])


async def _jct(bench: HostsBench, result: HostsResult, logs: Path) -> None:
    drivers = [_driver(bench, logs, name, *where) for name, where in sides(bench.workers).items()]
    workload = _workload(bench)
    async with serving(drivers, bench.say):
        for number, clients in enumerate(bench.concurrency):
            many, load, start = max(bench.requests, clients), closed(clients), number * SPACING
            bench.say(f"{clients} clients")
            await warm_up(drivers, workload.requests(start + SPACING // 2, max(4, clients)), load, clients)
            rounds = [workload.requests(start + round_ * many, many) for round_ in range(bench.rounds)]
            slices = by_side(await in_turn(drivers, rounds, load, clients, bench.say, _summary))
            first = slices[drivers[0].name]
            for side, taken in slices.items():
                pairs = [list(zip(a.outcomes, b.outcomes, strict=True)) for a, b in zip(taken, first, strict=True)]
                mine = outcomes_of(taken)
                result.jct.append(
                    JctRow(
                        clients,
                        side,
                        summary([one.jct for one in mine]),
                        summary([one.ttfa for one in mine]),
                        ratio([[(a.jct, b.jct) for a, b in both] for both in pairs]),
                        _equal([pair for both in pairs for pair in both]),
                    )
                )


async def _loss(bench: HostsBench, result: HostsResult, logs: Path) -> None:
    [(name, where)] = list(sides([2]).items())[1:]
    driver, workload = _driver(bench, logs, f"{name}, one lost", *where), _workload(bench)
    async with serving([driver], bench.say):
        for number, clients in enumerate(bench.concurrency):
            many, load = max(bench.requests, clients + 1), closed(clients)  # one runs after the first answer
            start = (len(bench.concurrency) + number) * SPACING
            await warm_up([driver], workload.requests(start + SPACING // 2, max(4, clients)), load, clients)
            undisturbed: list[OmniSlice] = []
            lost: list[OmniSlice] = []
            back = []
            for round_ in range(bench.rounds):
                requests = workload.requests(start + round_ * many, many)
                undisturbed += await in_turn([driver], [requests], load, clients, bench.say, _summary)
                driver.answered.clear()
                phase = random.Random(f"{bench.seed}/{number}/{round_}").random()
                usual = mean([one.jct for one in undisturbed[-1].outcomes])
                killer = asyncio.create_task(_kill(driver, phase * usual))
                try:
                    lost += await in_turn([driver], [requests], load, clients, bench.say, _summary)
                    await killer
                finally:
                    killer.cancel()
                began = asyncio.get_running_loop().time()
                driver.join()
                await driver.whole()
                back.append(asyncio.get_running_loop().time() - began)
            pairs = list(zip(outcomes_of(lost), outcomes_of(undisturbed), strict=True))
            result.losses.append(
                LossRow(
                    clients,
                    len(pairs),
                    summary([b.jct for _, b in pairs]),
                    summary([a.jct for a, _ in pairs]),
                    summary([a.jct - b.jct for a, b in pairs]),
                    mean([taken.wall for taken in undisturbed]),
                    mean([taken.wall for taken in lost]),
                    summary(back),
                    _equal(pairs),
                )
            )


async def _kill(driver: HostsDriver, seconds: float) -> None:
    """Kill the other host while requests run: some time after the first answer, when the next one is on its way."""
    await driver.answered.wait()
    await asyncio.sleep(seconds)
    driver.kill_host()


# ── the orchestrator's own limit ─────────────────────────────────────────────────────────────────────────────────────


async def _limit(bench: HostsBench, result: HostsResult, workers: int, steps: int) -> None:
    asked = Asked(workers=workers, steps=steps, together=bench.together, seconds=bench.seconds)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "segue.bench.hosts.limit", msgspec.json.encode(asked).decode()),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    try:
        said, _ = await child.communicate()
    except asyncio.CancelledError:
        child.terminate()
        await child.wait()
        raise
    if child.returncode != 0:
        raise StageFailed(f"the orchestrator's limit with {workers} workers was not measured: see above")
    row = msgspec.json.decode(said, type=LimitRow)
    bench.say(f"{workers} workers, {steps} steps: {row.per_second:.0f} requests/s")
    result.limits.append(row)
