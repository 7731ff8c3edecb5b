"""An HTTP server in processes of its own as one side of a benchmark: start it, pause it between its turns, stop it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from segue.messages.errors import StageFailed

START_SECONDS = 600.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.05


class ServerDriver:
    """A `LoadDriver` without `run`, for servers with `/health` and OpenAI's `/v1/models`."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """`--port N` is appended to `command`."""
        self.name = name
        self.startup = 0.0
        self._command = list(command)
        self._environment = dict(environment)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._client: httpx.AsyncClient | None = None
        self.model = ""
        """The server's name for its model."""

    @property
    def client(self) -> httpx.AsyncClient:
        assert self._client is not None, "not started"
        return self._client

    async def start(self) -> None:
        """Start the server and wait until `/health` succeeds. Raises `StageFailed` with the end of the log."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, "--port", port],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits)
        while not await self._healthy():
            if self._process.poll() is not None or time.monotonic() - began > START_SECONDS:
                end = self._log.read_text(errors="replace")[-2000:]
                raise StageFailed(f"{self.name} did not start; the end of {self._log}:\n{end}")
            await asyncio.sleep(POLL_SECONDS)
        self.startup = time.monotonic() - began
        self.model = (await self.client.get("/v1/models")).json()["data"][0]["id"]
        await self.hand_over()

    async def take_over(self, together: int) -> None:
        """Resume its processes."""
        self._signal(signal.SIGCONT)

    async def hand_over(self) -> None:
        """Pause its processes: vLLM's workers spin while they wait for a request."""
        self._signal(signal.SIGSTOP)

    async def stop(self) -> None:
        """End the server and all its processes; idempotent."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGCONT)
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None

    def processes(self) -> dict[int, str]:
        """Every process of the server, including those in other sessions; empty once it has ended."""
        if self._process is None or self._process.poll() is not None:
            return {}
        server = psutil.Process(self._process.pid)
        return {server.pid: "server"} | {child.pid: "worker" for child in server.children(recursive=True)}

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    async def _healthy(self) -> bool:
        try:
            return (await self.client.get("/health")).status_code == 200
        except httpx.TransportError:
            return False
