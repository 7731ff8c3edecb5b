"""How many requests per second one orchestrator carries: its own code and sockets, with simulated workers.

`python -m segue.bench.hosts.limit ASKED` (`Asked` as JSON) prints a `LimitRow` as JSON. All processes share one pair of
cores. The clients, a closed loop, are in the orchestrator's process, as `Omni`'s are.
"""

from __future__ import annotations

import asyncio
import cProfile
import itertools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Set
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import segue
from segue.bench.harness.meters import cpu_seconds
from segue.bench.harness.stats import summary
from segue.bench.hosts.results import LimitRow
from segue.bench.hosts.simulated import READ, SPEAK, WRITE, Simulated
from segue.graph.deployment.deployment import Hardware, Plan
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import StageGraph
from segue.messages.deltas import AudioDelta, Finished, TextDelta
from segue.messages.errors import ConfigError, StageFailed
from segue.messages.join import Listen
from segue.messages.process import ModelSource, WorkerSpec
from segue.messages.request import Request
from segue.messages.wire import ToOrchestrator, ToWorker
from segue.orchestrator.orchestrator import Orchestrator
from segue.orchestrator.workers.placement import Host, Placement
from segue.orchestrator.workers.supervisor import Supervisor

PAIR = 2
"""Cores that all processes share."""
FILES_PER_WORKER = 4
"""Open files of either process for each worker, at most."""
_OTHER_FILES = 256
_WARM_UP = 0.2
"""Part of the time in which requests do not count, before that."""
_PROMPT = 128
"""Token ids of a prompt."""
_MOST_FUNCTIONS = 12
_START_SECONDS = 120.0
_WAITING = "<method 'poll' of 'select.epoll' objects>"
"""Where an event loop waits for events."""


class Asked(msgspec.Struct):
    """What to measure."""

    workers: int
    """At least 4: a worker of each stage, and of the output stage, which every graph that speaks has."""
    steps: int
    """Emissions of the autoregressive stage per request."""
    together: int
    """Clients."""
    seconds: float


class SimulatedPlacement:
    """`Placement` of workers that one process simulates."""

    no_kernels = ""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.runtime_dir = ""
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self.runtime_dir = tempfile.mkdtemp(prefix="segue-", dir="/tmp")  # short: it is a part of sockets' names
        command = [sys.executable, "-m", "segue.bench.hosts.simulated", str(self._steps)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def host(self, node: str) -> Host | None:
        return Host(self.runtime_dir)

    def may_have(self, node: str) -> bool:
        return True

    def need(self, nodes: Set[str]) -> None:
        """The one process stays."""

    def spawn(self, spec: WorkerSpec, node: str) -> None:
        assert self.process is not None, "started"
        assert self.process.stdin is not None, "a pipe"
        stages = [str(stage["name"]) for stage in spec.stages]
        worker = Simulated(spec.worker, stages, spec.inbox, spec.orchestrator)
        self.process.stdin.write(msgspec.json.encode(worker) + b"\n")
        self.process.stdin.flush()

    def kill(self, pid: int, node: str) -> None:
        raise AssertionError("simulated workers do not hang")

    async def restart(self) -> None:
        raise AssertionError("simulated workers do not die")

    async def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None, "a pipe"
            self.process.stdin.close()
            self.process.wait()
            self.process = None
        shutil.rmtree(self.runtime_dir, ignore_errors=True)


class CountingSupervisor(Supervisor):
    """A supervisor whose workers are simulated. It counts messages."""

    def __init__(self, *arguments: Any, steps: int, **settings: Any) -> None:
        self.simulated = SimulatedPlacement(steps)
        self.messages = 0
        super().__init__(*arguments, **settings)

    def make_placement(self, preload: list[str], listen: Listen | None) -> Placement:
        return self.simulated

    def send(self, address: str, message: ToWorker) -> None:
        self.messages += 1
        super().send(address, message)

    def receive(self, message: ToOrchestrator) -> None:
        self.messages += 1
        super().receive(message)


def plan_of(asked: Asked) -> Plan:
    """Return a plan of three stages, all of whose workers are on this host."""
    graph = StageGraph("chain")
    graph.stage(WRITE, "autoregressive", takes={"text"}, gives={"text"})
    graph.stage(SPEAK, "module", gives={"audio"})
    graph.edge(WRITE, SPEAK)
    each = max(1, (asked.workers - 1) * 2 // 5)
    share = {"replicas": each, "memory_share": 0.4 / each}
    readers = asked.workers - 1 - 2 * each  # one more is of the output stage
    if readers < 1:
        raise ConfigError(f"workers is {asked.workers}; it must be at least 4: every stage has one", field="workers")
    deployment = {
        "stages": {READ: {"replicas": readers}, WRITE: share, SPEAK: share},
        "limits": {"max_waiting": asked.together + 1, "hang_seconds": 86400},
    }
    return load_plan(graph, deployment, hardware=Hardware(PAIR, 1 << 34))


class Load:
    """Clients in a closed loop."""

    def __init__(self, orchestrator: Orchestrator, together: int) -> None:
        self._orchestrator = orchestrator
        self._together = together
        self._numbers = itertools.count()
        self.jct: list[float] = []
        """Of every request that has ended in the last `run`."""

    async def run(self, seconds: float) -> float:
        """Send requests for so long; return the seconds until the last was answered."""
        self.jct, began = [], time.monotonic()
        async with asyncio.TaskGroup() as clients:
            for _ in range(self._together):
                clients.create_task(self._client(began + seconds))
        return time.monotonic() - began

    async def _client(self, end: float) -> None:
        while (sent := time.monotonic()) < end:
            number = next(self._numbers)
            ids = [number, *range(_PROMPT - 1)]
            request = Request(request_id=str(number), prompt_token_ids=ids, modalities=["text", "audio"])
            kinds: Counter[type] = Counter()
            async with aclosing(self._orchestrator.stream(request)) as deltas:
                async for delta in deltas:
                    kinds[type(delta)] += 1
            if not all(kinds[kind] for kind in (TextDelta, AudioDelta, Finished)):
                raise StageFailed(f"request {number} was answered with {dict(kinds)}")
            self.jct.append(time.monotonic() - sent)


async def measure(asked: Asked) -> LimitRow:
    """Start the orchestrator with simulated workers, load it, and load it again under a profiler."""
    ready: set[str] = set()
    all_ready = asyncio.Event()

    def on_progress(worker: str, fraction: float, what: str) -> None:
        ready.add(worker)
        if len(ready) == len(orchestrator.replicas.all):
            all_ready.set()

    orchestrator = Orchestrator(
        plan_of(asked),
        sources={"": ModelSource("chain", "/nowhere")},
        preload=[],
        on_progress=on_progress,
        supervise=partial(CountingSupervisor, steps=asked.steps),
    )
    supervisor = orchestrator.supervisor
    assert isinstance(supervisor, CountingSupervisor), "made by `supervise`"
    try:
        await orchestrator.start()
        async with asyncio.timeout(_START_SECONDS):
            await all_ready.wait()
        assert supervisor.simulated.process is not None, "started"
        workers = supervisor.simulated.process.pid
        load = Load(orchestrator, asked.together)
        await load.run(asked.seconds * _WARM_UP)
        messages, own, theirs = supervisor.messages, time.process_time(), cpu_seconds([workers])[workers]
        wall = await load.run(asked.seconds)
        count, jct = len(load.jct), summary(load.jct)
        row = LimitRow(
            workers=len(orchestrator.replicas.all),
            steps=asked.steps,
            together=asked.together,
            cores=len(os.sched_getaffinity(0)),
            per_second=count / wall,
            cpu_us=(time.process_time() - own) / count * 1e6,
            workers_cpu_us=(cpu_seconds([workers])[workers] - theirs) / count * 1e6,
            messages=(supervisor.messages - messages) / count,
            jct=jct,
        )
        profiler = cProfile.Profile()
        profiler.enable()
        await load.run(asked.seconds / 2)
        profiler.disable()
        row.profile = list(_shares(profiler))
        return row
    finally:
        await orchestrator.stop(drain=False)


def _shares(profiler: cProfile.Profile) -> Iterator[tuple[str, float]]:
    """Yield the functions that took the most time themselves, without what they call, and their share."""
    source = f"{Path(segue.__file__).parent}/"
    own: defaultdict[str, float] = defaultdict(float)
    for entry in profiler.getstats():
        if isinstance(entry.code, str):
            name = entry.code
        else:
            file = entry.code.co_filename
            where = file.removeprefix(source) if file.startswith(source) else Path(file).name
            name = f"{where}:{entry.code.co_name}"
        own[name] += entry.inlinetime
    own.pop(_WAITING, None)
    total = sum(own.values())
    for name, seconds in sorted(own.items(), key=lambda item: -item[1])[:_MOST_FUNCTIONS]:
        yield name, seconds / total


def main(argv: list[str]) -> None:
    [given] = argv
    asked = msgspec.json.decode(given, type=Asked)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:PAIR])
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = FILES_PER_WORKER * asked.workers + _OTHER_FILES
    if most != resource.RLIM_INFINITY and most < needed:
        raise ConfigError(f"{asked.workers} workers need {needed} open files; the limit (ulimit -Hn) is {most}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if most == resource.RLIM_INFINITY else most, most))
    print(msgspec.json.encode(asyncio.run(measure(asked))).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
