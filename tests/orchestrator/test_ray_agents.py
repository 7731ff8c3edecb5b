"""Agents that a Ray cluster runs: they join, come back when Ray's processes are killed, and leave nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from namespaces import hosts
from segue.bench.harness.namespaces import inside
from segue.graph.deployment.deployment import RayNode, RayPlan
from segue.messages.errors import ConfigError
from segue.messages.join import Listen, Welcome
from segue.orchestrator.workers.nodes.node_placement import NodePlacement
from segue.orchestrator.workers.nodes.ray_agents import RayAgents
from segue.orchestrator.workers.placement import LocalPlacement

HEAD, JOIN = 46379, 48900
HERE = "10.77.0.1"
TOKEN = "a-token-of-the-tests-0123456789abcdef"
PLAN = RayPlan(f"{HERE}:{HEAD}", {"away": RayNode(num_cpus=0, resources={"talkers": 1})})
PATIENCE = 150


class Raylet:
    """Ray's processes that one `ray start` makes."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        self.log = folder / f"{name}.log"
        script = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"
        command = [sys.executable, "-c", script, "start", "--block", f"--node-ip-address={HERE}"]
        with self.log.open("w") as log:
            more = ["--object-store-memory=80000000", "--disable-usage-stats", *words]
            self.process = subprocess.Popen([*command, *more], stdout=log, stderr=log)

    def kill(self) -> None:
        started = psutil.Process(self.process.pid)
        for process in [started, *started.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


@contextmanager
def cluster(folder: Path) -> Iterator[list[Raylet]]:
    """A head, and a raylet with the resource that the node needs."""
    running = [Raylet(folder, "head", "--head", f"--port={HEAD}", "--include-dashboard=false", "--num-cpus=1")]
    try:
        while "Ray runtime started" not in running[0].log.read_text():
            assert running[0].process.poll() is None, running[0].log.read_text()
            time.sleep(0.1)
        running.append(talker(folder))
        yield running
    finally:
        for raylet in running:
            raylet.kill()


def talker(folder: Path) -> Raylet:
    return Raylet(folder, "talker", f"--address={HERE}:{HEAD}", "--num-cpus=1", '--resources={"talkers": 1}')


class Events:
    """What a placement reports."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str] = asyncio.Queue()

    async def next(self) -> str:
        return await asyncio.wait_for(self.queue.get(), PATIENCE)


def _nothing(*_: object) -> None:
    """No worker is spawned here."""


@asynccontextmanager
async def placement() -> AsyncIterator[Events]:
    events = Events()
    local = LocalPlacement([], gpus=False, on_spawned=_nothing, on_exit=_nothing, on_lost=_nothing)
    listen = Listen(HERE, JOIN, TOKEN)
    made = NodePlacement(
        local,
        listen,
        ["away"],
        Welcome(0, [], False),
        agents=RayAgents(PLAN, listen, {"away"}),
        on_spawned=_nothing,
        on_exit=_nothing,
        on_node=lambda name: events.queue.put_nowait(f"{name} joined"),
        on_node_lost=lambda name, why: events.queue.put_nowait(f"{name} lost"),
    )
    await made.start()
    try:
        yield events
    finally:
        await made.close()


def named(*words: str) -> list[psutil.Process]:
    """Processes whose command line has these words."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if all(word in line for word in words):
            found.append(process)
    return found


@pytest.mark.needs("ray")
def test_agents_come_back_whatever_of_ray_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    for key, value in {"period_ms": "1000", "timeout_ms": "1000", "failure_threshold": "3"}.items():
        monkeypatch.setenv(f"RAY_health_check_{key}", value)

    async def run(running: list[Raylet]) -> None:
        async with placement() as events:
            assert await events.next() == "away joined"
            [actor] = named("ray::RayAgent")
            actor.kill()
            assert [await events.next() for _ in range(2)] == ["away lost", "away joined"]
            running.pop().kill()
            assert await events.next() == "away lost"
            running.append(talker(tmp_path))
            assert await events.next() == "away joined"
            [driver] = named("segue.orchestrator.workers.nodes.ray_driver")
            driver.kill()
            assert [await events.next() for _ in range(2)] == ["away lost", "away joined"]
        assert not named("segue.orchestrator.workers.nodes.ray_driver")

    # Ray listens on every interface
    with hosts(1) as [host], inside(host), cluster(tmp_path) as running:
        asyncio.run(run(running))
        for process in named("ray::RayAgent"):
            process.wait(30)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(ConfigError, match=r"pip install 'segue\[ray\]'|set RAY_AUTH_TOKEN_PATH"):
        RayAgents(PLAN, Listen(HERE, JOIN, TOKEN), {"away"})
