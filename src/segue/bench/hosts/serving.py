"""A model on one host, or on two: the server's side in this process, the other host's agent by `segue join`."""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from segue.bench.hosts.network import Network
from segue.bench.omni.families import OmniFamily
from segue.bench.omni.outcome import Outcome
from segue.bench.omni.segue_driver import SegueDriver
from segue.bench.omni.workload import BenchRequest
from segue.messages.addresses import SERVER
from segue.messages.errors import StageFailed
from segue.messages.join import Listen
from segue.models.registry import read_config

NODE = "node1"
MOVED = ("talker", "vocoder")
"""The stages that have workers on the other host."""
SILENCE = 1e-4
_PATIENCE = 300.0
"""Seconds until every worker is ready."""
_STOP_SECONDS = 30.0
_CLIENT_BLOCKS, _FEWEST_CLIENTS = 128, 16
"""KV blocks per client, as in `segue bench omni`."""


class HostsDriver(SegueDriver):
    """One side: the model with `workers` workers of each stage that moves, on these nodes in turn."""

    def __init__(
        self,
        name: str,
        model_dir: Path,
        family: OmniFamily,
        network: Network,
        logs: Path,
        *,
        workers: int,
        nodes: Sequence[str],
        clients: int,
    ) -> None:
        """`clients`: the most at a time. `logs`: directory of the agent's log."""
        self._network = network
        self._model_dir = model_dir
        self._log = logs / f"{name.replace(' ', '-').replace(',', '')}.log"
        self._joins = NODE in nodes
        self._listen = Listen(network.near.address, _free_port(network.near.address), secrets.token_hex(16))
        self._agent: subprocess.Popen[str] | None = None
        self._news = asyncio.Event()
        self._killed: set[int] = set()
        """Process ids of workers that are dead, whatever the server knows."""
        self.answered = asyncio.Event()
        """Set by every answer."""
        super().__init__(
            model_dir,
            family.suppressed(read_config(model_dir)),
            silence=SILENCE,
            dtype="float32",
            load_format="auto",
            unspoken_codes=family.unspoken_codes,
            config=deployment(workers, nodes, clients),
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


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def deployment(workers: int, nodes: Sequence[str], clients: int) -> dict[str, Any]:
    """Return the deployment of a side. All sides divide the work among stages alike."""
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
