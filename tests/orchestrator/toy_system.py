"""The whole system on the toy family: real processes, real sockets, real kills; no model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from segue.messages.deltas import Delta
from segue.messages.wire import ToWorker
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.outputs import Collector, RequestOutput
from segue.orchestrator.service import Health
from segue.orchestrator.workers.replicas import Replica


def expected_ids(text: str, count: int = 20) -> list[int]:
    from segue_toy.stages import VOCAB, next_token

    token, ids = 1 + ord(text[-1]) % (VOCAB - 1), []
    while len(ids) < count and (not ids or ids[-1] != 0 or count > 20):
        token = next_token(token)
        ids.append(token)
    return ids


def answer(text: str, count: int = 20) -> str:
    """What the toy writes."""
    from segue_toy.stages import text_of

    return text_of([token for token in expected_ids(text, count) if token])


def assert_right(output: RequestOutput, text: str, count: int = 20) -> None:
    """Text, ids and samples are what the toy's arithmetic says, none lost, none twice."""
    from segue_toy.stages import SAMPLES_PER_TOKEN, VOCAB, text_of

    ids = expected_ids(text, count)
    assert output.token_ids == {"counter": ids}
    assert output.text == text_of([token for token in ids if token])
    if output.audio is not None:
        prompt = [1 + ord(letter) % (VOCAB - 1) for letter in text]
        values = np.array([*prompt, *ids[:-1]], dtype=np.float32) / VOCAB  # the last token is never forwarded
        np.testing.assert_allclose(output.audio.samples, np.repeat(values, SAMPLES_PER_TOKEN), rtol=1e-6)


class System:
    """Running toys on one event loop. Starting one costs seconds (its workers import torch): most tests share one."""

    def __init__(self, toy_dir: Path) -> None:
        self._toy_dir = toy_dir
        self._loop = asyncio.new_event_loop()
        self._shared: AsyncOmni | None = None

    def run(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop.run_until_complete(asyncio.wait_for(body(), timeout=600))

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[AsyncOmni]:
        if self._shared is None:
            self._shared = AsyncOmni(self._toy_dir)
            await self._shared.start()
        yield self._shared
        assert not self._shared.orchestrator.requests

    @asynccontextmanager
    async def own(self, **config: Any) -> AsyncIterator[AsyncOmni]:
        async with AsyncOmni(self._toy_dir, config=config) as omni:
            yield omni

    def close(self) -> None:
        if self._shared is not None:
            self._loop.run_until_complete(self._shared.stop())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


async def kill(pid: int, held: int | None = None) -> None:
    """kill -9, and wait until it is gone. `held`: its end of the gate that it is held at, closed while it dies: whoever
    comes after it finds the gate as it was."""
    process = psutil.Process(pid)
    process.kill()
    if held is not None:
        os.close(held)
    await asyncio.to_thread(process.wait)


def both(text: str, **options: Any) -> dict[str, Any]:
    message = {"messages": [{"role": "user", "content": text}], "modalities": ["text", "audio"]}
    return {**message, "options": options} if options else message


async def collect(
    omni: AsyncOmni, prompt: Any, on_delta: Callable[[Delta], None] = lambda delta: None
) -> RequestOutput:
    request = omni.request(prompt)
    collector = Collector(request.request_id, wants_audio="audio" in request.modalities)
    async for delta in omni.stream(request):
        on_delta(delta)
        collector.add(delta)
    return collector.output()


def pid_of(health: Health, stage: str) -> int:
    [replica] = health.stages[stage].replicas
    assert replica.pid is not None
    return replica.pid


class Gate:
    """Holds a stage at a known point: `reached` returns when it is there; `open` lets it go on."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "gate")
        os.mkfifo(self.path)

    def option(self, stage: str, at: int) -> dict[str, Any]:
        return {"stage": stage, "at": at, "fifo": self.path}

    async def reached(self) -> int:
        return await asyncio.to_thread(os.open, self.path, os.O_WRONLY)

    def keep(self) -> int:
        """Hold whoever comes until this is closed, without waiting for them."""
        return os.open(self.path, os.O_RDWR)

    def remove(self) -> None:
        os.unlink(self.path)


async def all_ready(omni: AsyncOmni) -> None:
    while any(one.state != "ready" for one in omni.orchestrator.replicas.all):
        await asyncio.sleep(0)


@asynccontextmanager
async def held(omni: AsyncOmni, directory: Path, stage: str) -> AsyncIterator[None]:
    """Two requests that are held in a stage, each in a worker of its own; afterwards both are right."""
    gates = []
    for name in "xy":
        (directory / name).mkdir()
        gates.append(Gate(directory / name))
    asked = [both(name, hold=gate.option(stage, 3)) for name, gate in zip("xy", gates, strict=True)]
    tasks = [asyncio.create_task(collect(omni, prompt)) for prompt in asked]
    ends = [await gate.reached() for gate in gates]
    for gate in gates:
        gate.remove()  # elsewhere they go on
    yield
    for end in ends:
        os.close(end)
    for task, name in zip(tasks, "xy", strict=True):
        output = await task
        assert_right(output, name)
        assert output.metrics.attempts == 1, "it was planned, and is no loss"


@dataclass
class Recorded:
    """Processes that only note what is done to them."""

    done: list[tuple[str, str]] = field(default_factory=list)
    away: frozenset[str] = frozenset()
    """Nodes that have not joined."""

    def has_node(self, node: str) -> bool:
        return node not in self.away

    def may_have(self, node: str) -> bool:
        return self.has_node(node)

    def update_nodes(self) -> None: ...

    def send(self, address: str, message: ToWorker) -> None:
        self.done.append(("send", type(message).__name__))

    def spawn(self, replica: Replica) -> None:
        replica.incarnation += 1
        replica.state = "starting"
        self.done.append(("spawn", replica.worker))

    def kill(self, replica: Replica) -> None:
        self.done.append(("kill", replica.worker))
