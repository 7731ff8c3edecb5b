"""A server with OpenAI's `/v1/completions` as one side of a benchmark: start it, send requests, stop it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from segue.bench.text.workload import TextOutcome, TextRequest
from segue.messages.errors import StageFailed

START_SECONDS = 600.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.05


class HttpDriver:
    """One server in its own processes."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """`--port N` is appended to `command`."""
        self.name = name
        self.startup = 0.0
        self._command = list(command)
        self._environment = dict(environment)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._client: httpx.AsyncClient | None = None
        self._model = ""

    async def start(self) -> None:
        """Start the server and wait until `/health` succeeds. Raises `StageFailed` with the end of the log."""
        port = _free_port()
        began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(port)],
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
        answer = await self._client.get("/v1/models")
        self._model = answer.json()["data"][0]["id"]
        await self.hand_over()

    async def take_over(self, together: int) -> None:
        """Resume its processes."""
        self._signal(signal.SIGCONT)

    async def hand_over(self) -> None:
        """Pause its processes: vLLM's workers spin while they wait for a request."""
        self._signal(signal.SIGSTOP)

    async def run(self, request: TextRequest) -> TextOutcome:
        assert self._client is not None, "not started"
        sent = time.monotonic()
        times: list[float] = []
        ids: list[int] = []
        async with self._client.stream("POST", "/v1/completions", json=self._body(request)) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                raise StageFailed(f"{self.name} answered {answer.status_code}: {text[:500]}")
            async for line in answer.aiter_lines():
                new = _tokens(self.name, line)
                times += [time.monotonic() - sent] * len(new)
                ids += new
        return TextOutcome(
            index=request.index,
            prompt_tokens=len(request.prompt),
            times=times,
            jct=time.monotonic() - sent,
            token_ids=ids,
        )

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
        assert self._client is not None
        try:
            return (await self._client.get("/health")).status_code == 200
        except httpx.TransportError:
            return False

    def _body(self, request: TextRequest) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.tokens,
            "min_tokens": request.tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "return_token_ids": True,
        }


def _tokens(name: str, line: str) -> list[int]:
    """The token ids in one line of an event stream."""
    data = line.removeprefix("data:").strip()
    if data == line or not data or data == "[DONE]":
        return []
    event = json.loads(data)
    if "error" in event:
        raise StageFailed(f"{name} failed: {event['error']}")
    return [token for choice in event["choices"] for token in choice.get("token_ids") or []]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def segue_command(model: Path, dtype: str, deployment: Path) -> list[str]:
    command = [sys.executable, "-m", "segue.cli", "serve", str(model)]
    return [*command, "--dtype", dtype, "--config", str(deployment), "--host", "127.0.0.1"]


def vllm_command(python: Path, model: Path, dtype: str, *, max_batch: int, max_model_len: int) -> list[str]:
    options = ["--dtype", dtype, "--no-enable-prefix-caching", "--generation-config", "vllm", "--host", "127.0.0.1"]
    sizes = ["--max-num-seqs", str(max_batch), "--max-model-len", str(max_model_len)]
    return [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model), *options, *sizes]


def vllm_environment(threads: int, cache_gib: int) -> dict[str, str]:
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": "",
    }
