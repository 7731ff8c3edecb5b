"""A server on one host and nodes on others, as two operators start them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml
from ray_cluster import RayCluster, cluster

from mooncake_master import Master, running_master
from namespaces import hosts, processes
from segue.bench.harness.namespaces import Host

TOKEN = "a token of the tests"
CLIENT = str(Path(__file__).with_name("hosts_client.py"))
TOYS = str(Path(__file__).parents[1] / "toys")
PATHS = os.pathsep.join([str(Path(__file__).parents[2] / "src"), TOYS, *filter(None, [os.environ.get("PYTHONPATH")])])
STARTED = r"^segue-"
"""The names of fork servers and workers."""
PATIENCE = 150.0
"""Seconds for a start on a loaded machine."""
Answer = dict[str, Any]


class Hosts:
    """A running server and its nodes; each host has the checkpoint somewhere else."""

    def __init__(
        self,
        made: list[Host],
        model: Path,
        deployment: Mapping[str, Any],
        logs: Path,
        master: Master | None = None,
        ray: RayCluster | None = None,
        shared: Mapping[Path, str] | None = None,
        words: Sequence[str] = (),
    ) -> None:
        self.master = master
        self.ray = ray
        self._shared = dict(shared or {})
        self._words = words
        self.hosts = {"server": made[0], **{f"node{n}": host for n, host in enumerate(made[1:], 1)}}
        self._model = model
        self._logs = logs
        self.running: dict[str, subprocess.Popen[str]] = {}
        (logs / "deploy").mkdir()
        (logs / "deploy" / "deployment.yaml").write_text(yaml.safe_dump(dict(deployment)))
        self.url = f"http://{made[0].address}:8000"
        self.serve()
        for name in list(self.hosts)[1:]:
            if ray is None:
                self.join(name)

    def serve(self) -> None:
        """Start the server, which must not run."""
        address, ray = self.hosts["server"].address, self.ray
        mounts = {self._model: "/server/model", self._logs / "deploy": "/deploy", **(ray.mounts(0) if ray else {})}
        self.running["server"] = self.hosts["server"].start(
            *("-m", "segue.cli", "serve", "/server/model", "--config", "/deploy/deployment.yaml", "--host", address),
            *("--name", "tiny", "--listen", address, *self._words),
            mounts={**mounts, **self._shared},
            log=self.log("server"),
            **{**self._variables(), **(ray.variables if ray else {})},
        )

    def kill_server(self) -> None:
        """Kill -9 the server, and wait until all that it started has ended, on every host."""
        self.running["server"].kill()
        self.running["server"].wait()
        self.until_none(rf"{STARTED}|ray_driver|ray::RayAgent")

    def until_none(self, pattern: str) -> None:
        """Return when no process on any host has a name and command line that match."""
        end = time.monotonic() + PATIENCE
        while left := [one for host in self.hosts.values() for one in processes(host) if re.search(pattern, one)]:
            assert time.monotonic() < end, f"{left} have not ended"
            time.sleep(0.1)

    def join(self, name: str) -> None:
        self.running[name] = self.hosts[name].start(
            *("-m", "segue.cli", "join", self.hosts["server"].address, "--name", name, "--model", "/elsewhere"),
            mounts={self._model: "/elsewhere", **self._shared},
            log=self.log(name),
            **self._variables(),
        )

    def _variables(self) -> dict[str, str]:
        return {"SEGUE_JOIN_TOKEN": TOKEN, "PYTHONPATH": PATHS}

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def count(self, pattern: str, name: str = "server") -> int:
        """How many lines of a log match."""
        return len(re.findall(pattern, self.log(name).read_text()))

    def wait(self, pattern: str, count: int = 1, name: str = "server", seconds: float = PATIENCE) -> None:
        """Return when so many lines of a log match; they are how another host tells of itself."""
        end = time.monotonic() + seconds
        while self.count(pattern, name) < count:
            assert time.monotonic() < end, f"no {pattern!r} in {self.all_logs()}"
            assert self.running[name].poll() is None, self.all_logs()
            time.sleep(0.1)

    def all_logs(self) -> str:
        return "\n".join(f"── {name}\n{self.log(name).read_text()[-4000:]}" for name in self.running)

    def asking(self, *prompts: str, seconds: float = 0.0, parallel: int = 4) -> subprocess.Popen[str]:
        """Start clients on the server's host."""
        return self.hosts["server"].start(CLIENT, self.url, str(seconds), str(parallel), *prompts)

    def answers(self, client: subprocess.Popen[str]) -> list[Answer]:
        assert client.stdout is not None
        with client:
            *_, said = client.stdout.read().splitlines()
        found: list[Answer] = json.loads(said)
        return found

    def until_answered(self, client: subprocess.Popen[str]) -> None:
        """Wait for a client's first answer: others of its questions are being answered then."""
        assert client.stdout is not None
        assert client.stdout.readline() == "answered\n"

    def ask(self, *prompts: str) -> dict[str, tuple[str, str]]:
        """Ask every prompt once; return prompt → what came."""
        found = self.answers(self.asking(*prompts))
        assert all(one["status"] == 200 for one in found), (found, self.all_logs())
        assert all(one["audio_bytes"] > 1000 for one in found)
        return {one["prompt"]: (one["text"], one["audio"]) for one in found}

    def processes(self, name: str) -> dict[str, psutil.Process]:
        """The processes of a node: its agent, its fork server, and its workers by name."""
        agent = psutil.Process(self.running[name].pid)
        found = {"agent": agent}
        for child in agent.children():
            found["forks"] = child
            found |= {worker.name(): worker for worker in child.children()}
        return found

    def end(self) -> None:
        for process in reversed(self.running.values()):
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(30)
            finally:
                process.kill()


@contextmanager
def system(
    count: int,
    model: Path,
    deployment: Mapping[str, Any],
    logs: Path,
    *,
    master: bool = False,
    ray: bool = False,
    shared: Mapping[Path, str] | None = None,
    words: Sequence[str] = (),
) -> Iterator[Hosts]:
    """`master`: with a Mooncake master on the server's host, as `Hosts.master`. `ray`: the hosts are a Ray cluster,
    `Hosts.ray`, and nobody else starts nodes. `shared`: directory → where every host has it. `words`: more for `segue
    serve`."""
    with ExitStack() as stack:
        made = stack.enter_context(hosts(count))
        mooncake = stack.enter_context(running_master(made)) if master else None
        mounts = {model: "/elsewhere", **(shared or {})}
        made_ray = stack.enter_context(cluster(made, logs / "ray", mounts, PATHS)) if ray else None
        running = Hosts(made, model, deployment, logs, mooncake, made_ray, shared, words)
        stack.callback(running.end)
        running.wait("is served at")
        yield running
