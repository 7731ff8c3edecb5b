"""`segue bench hosts`: what it costs to leave one machine. A model is on one host, or on two: the server's side in this
process, the other host's agent by `segue join`."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from segue.bench.harness.hardware import machine
from segue.bench.harness.load import closed, in_turn, outcomes_of, serving, warm_up
from segue.bench.harness.process import python_path
from segue.bench.harness.results import Level, measure
from segue.bench.harness.rounds import compared
from segue.bench.harness.stats import mean, summary
from segue.bench.hosts import hops
from segue.bench.hosts.arguments import HostsBench
from segue.bench.hosts.limit import Asked
from segue.bench.hosts.results import HostsResult, JctRow, LimitRow, LossRow, size_of
from segue.bench.omni.families import omni_family
from segue.bench.omni.outcome import OmniSlice, Outcome
from segue.bench.omni.segue_driver import SegueDriver
from segue.bench.omni.workload import BenchRequest, Material, Workload
from segue.messages.addresses import SERVER
from segue.messages.errors import StageFailed
from segue.messages.join import Listen
from segue.models.registry import read_config

NODE = "node1"
MOVED = ("talker", "vocoder")
"""The stages that have workers on the other host."""
SILENCE = 1e-4
SPACING = 1_000_000
"""Index distance between levels, so that no request repeats and no cache has seen it."""
_PATIENCE = 300.0
"""Seconds until every worker is ready."""
_STOP_SECONDS = 30.0
_CLIENT_BLOCKS, _FEWEST_CLIENTS = 128, 16
"""KV blocks per client, as in `segue bench omni`."""


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
    parts = {"hops": _hops, "jct": _jct, "loss": _loss}
    levels: list[Level] = [partial(one, bench, result, logs) for part, one in parts.items() if part in bench.parts]
    if "limit" in bench.parts:
        asked = [(workers, bench.steps[0]) for workers in bench.simulated]
        asked += [(max(bench.simulated), steps) for steps in bench.steps[1:]]
        levels += [partial(_limit, bench, result, *one) for one in asked]
    return await measure(result, levels, bench.keep)


async def _hops(bench: HostsBench, result: HostsResult, logs: Path) -> None:
    sizes = [1024 * kib for kib in bench.kib]
    for row in hops.measure(bench.hosts, sizes, bench.hop_rounds, hops.usable(bench.hosts), logs):
        bench.say(f"{size_of(row.bytes)}, {row.way}: {row.median_ms:.2f} ms")
        result.hops.append(row)


# ── a model over two hosts ───────────────────────────────────────────────────────────────────────────────────────────


class HostsDriver(SegueDriver):
    """One side: the model with `workers` workers of each stage that moves, on these nodes in turn."""

    def __init__(self, bench: HostsBench, logs: Path, name: str, workers: int, nodes: Sequence[str]) -> None:
        """`logs`: directory of the agent's log."""
        family = omni_family(config := read_config(bench.model_dir), bench.model_dir)
        self._network, self._model_dir = bench.hosts, bench.model_dir
        self._log = logs / f"{name.replace(' ', '-').replace(',', '')}.log"
        address = bench.hosts.near.address
        with socket.create_server((address, 0)) as free:
            self._listen = Listen(address, free.getsockname()[1], secrets.token_hex(16))
        self._joins = NODE in nodes
        self._agent: subprocess.Popen[str] | None = None
        self._news = asyncio.Event()
        self._killed: set[int] = set()
        """Process ids of workers that are dead, whatever the server knows."""
        self.answered = asyncio.Event()
        """Set by every answer."""
        super().__init__(
            bench.model_dir,
            family.suppressed(config),
            silence=SILENCE,
            dtype="float32",
            load_format="auto",
            unspoken_codes=family.unspoken_codes,
            config=deployment(workers, nodes, max(bench.concurrency)),
            name=name,
            on_progress=lambda worker, fraction, what: self._news.set(),
            listen=self._listen if self._joins else None,
        )

    async def start(self) -> None:
        """Return when every worker is ready."""
        began = time.monotonic()
        if self._joins:
            self.join()
        await super().start()
        await self.whole()
        self.startup = time.monotonic() - began

    def join(self) -> None:
        """Start the other host's agent."""
        server = f"{self._listen.host}:{self._listen.port}"
        self._agent = self._network.far.start(
            *("-m", "segue.cli", "join", server, "--name", NODE, "--model", str(self._model_dir)),
            mounts={self._model_dir: str(self._model_dir)},
            log=self._log,
            SEGUE_JOIN_TOKEN=self._listen.token,
        )

    async def whole(self) -> None:
        """Return when every worker is ready, a killed host's anew. Raises `StageFailed` if that takes too long."""
        try:
            async with asyncio.timeout(_PATIENCE):
                while not self._whole():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            end = self._log.read_text(errors="replace")[-2000:] if self._log.is_file() else ""
            raise StageFailed(f"{self.name}: not every worker is ready after {_PATIENCE:g} s. {end}") from error
        self._killed.clear()

    def _whole(self) -> bool:
        replicas = [one for stage in self._omni.health().stages.values() for one in stage.replicas]
        return all(one.state == "ready" and one.pid not in self._killed for one in replicas)

    def kill_host(self) -> None:
        """SIGKILL every process of the other host: its agent, fork server and workers, in this order."""
        assert self._agent is not None, "a side on two hosts"
        agent = psutil.Process(self._agent.pid)
        everything = [agent, *agent.children(recursive=True)]
        self._killed |= {process.pid for process in everything}
        for process in everything:
            with suppress(psutil.NoSuchProcess):  # workers end with their agent
                process.kill()
        self._agent.wait()

    async def run(self, request: BenchRequest) -> Outcome:
        outcome = await super().run(request)
        self.answered.set()
        return outcome

    async def stop(self) -> None:
        await super().stop()
        if self._agent is not None:
            self._agent.terminate()
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._agent.wait, _STOP_SECONDS)
            self._agent.kill()
            self._agent.wait()
            self._agent = None


def deployment(workers: int, nodes: Sequence[str], clients: int) -> dict[str, Any]:
    """Return the deployment of a side; `clients`: the most at a time. All sides divide the work among stages alike."""
    # a request is sent twice, undisturbed and while a host is lost
    cache = {"kv_blocks": _CLIENT_BLOCKS * max(_FEWEST_CLIENTS, clients), "prefix_caching": False}
    stages: dict[str, dict[str, Any]] = {name: {"replicas": workers, "node": list(nodes)} for name in MOVED}
    stages["talker"] |= cache
    return {"defaults": {"devices": ["cpu"], "threads": 1}, "stages": {**stages, "thinker": cache}}


def sides(workers: Sequence[int]) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return side → (workers of each stage that moves, their nodes). The first is that on one host; one worker on two
    hosts is on the other one."""
    found: dict[str, tuple[int, tuple[str, ...]]] = {"one host, 1 worker": (1, (SERVER,))}
    for many in workers:
        name = f"two hosts, {many} worker{'s' if many > 1 else ''}"
        found[name] = (many, (NODE,) if many == 1 else (SERVER, NODE))
    return found


class Rounds:
    """The requests of every level."""

    def __init__(self, bench: HostsBench) -> None:
        family = omni_family(read_config(bench.model_dir), bench.model_dir)
        self._workload = Workload(Material.read(bench.assets), bench.seed, codes_per_token=family.codes_per_token)
        self._rounds = bench.rounds

    def level(self, number: int, clients: int, many: int) -> tuple[list[BenchRequest], list[list[BenchRequest]]]:
        """Return requests of a level that do not count, and rounds of so `many`."""
        take, start = self._workload.requests, number * SPACING
        rounds = [take(start + round_ * many, many) for round_ in range(self._rounds)]
        return take(start + SPACING // 2, max(4, clients)), rounds


def _summary(taken: OmniSlice) -> str:
    return f"{taken.wall:.1f} s, mean JCT {mean([one.jct for one in taken.outcomes]):.2f} s"


def _same(one: Outcome, other: Outcome) -> bool:
    """Whether reply and codes are the same."""
    return (one.text_ids, one.code_ids) == (other.text_ids, other.code_ids)


async def _jct(bench: HostsBench, result: HostsResult, logs: Path) -> None:
    drivers = [HostsDriver(bench, logs, name, *where) for name, where in sides(bench.workers).items()]
    requests = Rounds(bench)
    async with serving(drivers, bench.say):
        for number, clients in enumerate(bench.concurrency):
            level = requests.level(number, clients, max(bench.requests, clients))
            for side, one in (await compared(drivers, *level, clients, bench.say, _summary)).items():
                jct, ttfa = one.summary(lambda it: it.jct), one.summary(lambda it: it.ttfa)
                by_first = one.of_first(lambda it: it.jct)
                result.jct.append(JctRow(clients, side, jct, ttfa, by_first, one.equal(_same)))


async def _loss(bench: HostsBench, result: HostsResult, logs: Path) -> None:
    [(name, where)] = list(sides([2]).items())[1:]
    driver, requests = HostsDriver(bench, logs, f"{name}, one lost", *where), Rounds(bench)
    async with serving([driver], bench.say):
        for number, clients in enumerate(bench.concurrency):
            many, load = max(bench.requests, clients + 1), closed(clients)  # one runs after the first answer
            warm, rounds = requests.level(len(bench.concurrency) + number, clients, many)
            await warm_up([driver], warm, load, clients)
            undisturbed: list[OmniSlice] = []
            lost: list[OmniSlice] = []
            back = []
            for round_, asked in enumerate(rounds):
                undisturbed += await in_turn([driver], [asked], load, clients, bench.say, _summary)
                driver.answered.clear()
                phase = random.Random(f"{bench.seed}/{number}/{round_}").random()
                usual = mean([one.jct for one in undisturbed[-1].outcomes])
                killer = asyncio.create_task(_kill(driver, phase * usual))
                try:
                    lost += await in_turn([driver], [asked], load, clients, bench.say, _summary)
                    await killer
                finally:
                    killer.cancel()
                began = time.monotonic()
                driver.join()
                await driver.whole()
                back.append(time.monotonic() - began)
            pairs = list(zip(outcomes_of(lost), outcomes_of(undisturbed), strict=True))
            result.losses.append(
                LossRow(
                    *(clients, len(pairs)),
                    undisturbed=summary([b.jct for _, b in pairs]),
                    lost=summary([a.jct for a, _ in pairs]),
                    delay=summary([a.jct - b.jct for a, b in pairs]),
                    wall=mean([taken.wall for taken in undisturbed]),
                    wall_lost=mean([taken.wall for taken in lost]),
                    back=summary(back),
                    equal=mean([float(_same(a, b)) for a, b in pairs]),
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
