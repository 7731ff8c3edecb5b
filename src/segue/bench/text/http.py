"""Servers with OpenAI's `/v1/completions` as sides of `segue bench text`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from segue.bench.harness.server import ServerDriver
from segue.bench.text.workload import TextOutcome, TextRequest
from segue.messages.errors import StageFailed


class HttpDriver(ServerDriver):
    """One server in its own processes."""

    async def run(self, request: TextRequest) -> TextOutcome:
        sent = time.monotonic()
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.tokens,
            "min_tokens": request.tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "return_token_ids": True,
        }
        times: list[float] = []
        ids: list[int] = []
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                raise StageFailed(f"{self.name} answered {answer.status_code}: {text[:500]}")
            async for line in answer.aiter_lines():
                new = _tokens(self.name, line)
                times += [time.monotonic() - sent] * len(new)
                ids += new
        return TextOutcome(index=request.index, times=times, jct=time.monotonic() - sent, token_ids=ids)


def _tokens(name: str, line: str) -> list[int]:
    """The token ids in one line of an event stream."""
    data = line.removeprefix("data:").strip()
    if data == line or not data or data == "[DONE]":
        return []
    event = json.loads(data)
    if "error" in event:
        raise StageFailed(f"{name} failed: {event['error']}")
    return [token for choice in event["choices"] for token in choice.get("token_ids") or []]


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
