"""A Ray cluster whose head is on the server's host and whose other hosts have one resource `talkers` each."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from segue.bench.harness.namespaces import Host

PORT = 6379
_PATIENCE = 120.0
_QUICK = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""So that Ray notices a host that is gone within seconds."""


_PORTS = (
    *("--dashboard-agent-grpc-port=52366", "--dashboard-agent-listen-port=52365"),
    *("--metrics-export-port=52367", "--runtime-env-agent-port=52368"),
)
"""Given, for else a raylet ends whose agents do not choose some within 15 s, too short on a busy machine."""
_TRIES = 4


class RayCluster:
    """A running cluster."""

    def __init__(self, hosts: Sequence[Host], folder: Path, mounts: Mapping[Path, str], paths: str) -> None:
        """`mounts`: what every host but the server's has. `paths`: Python's."""
        self._hosts = hosts
        self._folder = folder
        self._mounts = mounts
        (folder / "token").mkdir(parents=True)
        (folder / "token" / "token").write_text("a-token-of-the-tests-0123456789abcdef")
        self.variables = {**_QUICK, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/token/token"}
        self._paths = paths
        self._running: dict[int, subprocess.Popen[str]] = {}
        for number in range(len(hosts)):
            self.start(number)

    def start(self, number: int) -> None:
        """Start Ray on a host; again if Ray gives up, which it does where a start takes long."""
        words = [f"--address={self._hosts[0].address}:{PORT}", "--num-cpus=1", '--resources={"talkers": 1}']
        if number == 0:
            words = ["--head", f"--port={PORT}", "--include-dashboard=false", "--num-cpus=1"]
        for _ in range(_TRIES):
            self._launch(number, words)
            if self._started(number):
                return
            self.kill(number)
        pytest.fail(f"Ray does not start: {self.log(number).read_text()[-4000:]}")

    def mounts(self, number: int) -> dict[Path, str]:
        """What a host's processes of Ray share with others there: they meet in /tmp/ray."""
        shared = self._folder / f"ray{number}"
        shared.mkdir(exist_ok=True)
        return {self._folder / "token": "/token", shared: "/tmp/ray"}

    def log(self, number: int) -> Path:
        return self._folder / f"ray{number}.log"

    def kill(self, number: int) -> None:
        """Kill -9 all processes of Ray on a host, and so the agent that it runs."""
        started = psutil.Process(self._running[number].pid)
        for process in [started, *started.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._running.pop(number).wait()

    def end(self) -> None:
        for number in list(self._running):
            self.kill(number)

    def _launch(self, number: int, words: Sequence[str]) -> None:
        host = self._hosts[number]
        script = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"
        self.log(number).write_text("")
        self._running[number] = host.start(
            *("-c", script, "start", "--block", f"--node-ip-address={host.address}"),
            *("--object-store-memory=80000000", "--disable-usage-stats", *_PORTS, *words),
            mounts={**self.mounts(number), **(self._mounts if number else {})},
            log=self.log(number),
            **{**self.variables, "PYTHONPATH": self._paths},
        )

    def _started(self, number: int) -> bool:
        end = time.monotonic() + _PATIENCE
        while "Ray runtime started" not in self.log(number).read_text():
            if time.monotonic() > end or self._running[number].poll() is not None:
                return False
            time.sleep(0.2)
        return True


@contextmanager
def cluster(hosts: Sequence[Host], folder: Path, mounts: Mapping[Path, str], paths: str) -> Iterator[RayCluster]:
    made = RayCluster(hosts, folder, mounts, paths)
    try:
        yield made
    finally:
        made.end()
