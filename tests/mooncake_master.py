"""A real Mooncake master on a host that the tests made: Mooncake listens on every interface."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from segue.bench.harness.namespaces import Host, inside
from segue.connectors.mooncake.library import load
from segue.messages.errors import ConfigError

PORT = 50051
_PATIENCE = 30.0


def need_mooncake() -> None:
    """Skip where Mooncake cannot be loaded, with the command that would enable it; where CI runs it must."""
    try:
        load("engine")
    except ConfigError as error:
        if os.environ.get("SEGUE_CI"):
            pytest.fail(error.message)
        pytest.skip(error.message)


class Master:
    """A master that runs on the first of some hosts, with a metadata server."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.host, *self.others = hosts
        self.address = f"{self.host.address}:{PORT}"
        self.metadata_server = f"http://{self.host.address}:8080/metadata"
        self.start()

    def start(self) -> None:
        package = Path(load("engine").__file__).parent
        words = [str(package / "mooncake_master"), f"--rpc_address={self.host.address}", f"--rpc_port={PORT}"]
        words += ["--enable_http_metadata_server=true", f"--http_metadata_server_host={self.host.address}"]
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.host.name, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with inside(self.host):
            for port in (PORT, 8080):
                self._wait(port)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _wait(self, port: int) -> None:
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                socket.create_connection((self.host.address, port), 1).close()
                return
            except OSError:
                assert time.monotonic() < end, "the master does not start"
                assert self.process.poll() is None, "the master ended"
                time.sleep(0.05)


@contextmanager
def running_master(hosts: Sequence[Host]) -> Iterator[Master]:
    running = Master(hosts)
    try:
        yield running
    finally:
        running.kill()
