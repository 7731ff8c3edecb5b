"""Start a baseline's process from the benchmark, and exchange messages with it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

import segue
from segue.bench.harness.channel import LENGTH, Broken, Work, frame
from segue.messages.errors import StageFailed
from segue.orchestrator.placement import WORKER_ENVIRONMENT


class Numbered(Protocol):
    """Requests and answers: their index shows which belong together."""

    @property
    def index(self) -> int: ...


RequestT = TypeVar("RequestT", bound=Numbered)
LoadedT = TypeVar("LoadedT")
AnswerT = TypeVar("AnswerT", bound=Numbered)


def python_path() -> str:
    """`PYTHONPATH` for child processes, so that they run this package, installed or not."""
    source = str(Path(segue.__file__).parents[1])
    return os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))


def same_environment(threads: int, preload: Path | None = None) -> dict[str, str]:
    """Environment variables for the processes of every side: allocator, huge pages and spinning as in Segue's workers.

    `threads`: for OpenMP; `preload`: a library.
    """
    given = WORKER_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    return given if preload is None else given | {"LD_PRELOAD": str(preload)}


class ChildProcess(Generic[RequestT, LoadedT, AnswerT]):
    """A process shared by the drivers of one benchmark, so that the model is loaded once."""

    def __init__(
        self,
        name: str,
        module: str,
        options: msgspec.Struct,
        loaded: type[LoadedT],
        answer: type[AnswerT],
        environment: Mapping[str, str],
    ) -> None:
        """`name`: for messages. `module`: the process's main module; it sends `loaded` once and `answer` per request.
        `environment`: in addition to this process's."""
        self._name, self._module = name, module
        self._options = options
        self._environment = dict(environment)
        self._loaded_type, self._answer_type = loaded, answer
        self._decoder = msgspec.msgpack.Decoder[Any](loaded | answer | Broken)
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[AnswerT]] = {}
        self._loaded: asyncio.Future[LoadedT] | None = None
        self.startup = 0.0
        """Seconds until the model was loaded."""

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def start(self) -> LoadedT:
        """Start the process once, and return when the model is loaded. Raises `StageFailed` with the process's
        error."""
        if self._loaded is None:
            began = time.monotonic()
            self._loaded = asyncio.get_running_loop().create_future()
            ours, theirs = socket.socketpair()
            with theirs:
                options = msgspec.json.encode(self._options).decode()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", self._module, str(theirs.fileno()), options],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": python_path(), **self._environment},
                )
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._listener = asyncio.create_task(self._listen(reader))
            await asyncio.shield(self._loaded)
            self.startup = time.monotonic() - began
        return await asyncio.shield(self._loaded)

    async def send(self, message: msgspec.Struct) -> None:
        assert self._writer is not None, "not started"
        self._writer.write(frame(message))
        await self._writer.drain()

    async def ask(self, request: RequestT) -> AnswerT:
        """Send a request and wait for its answer."""
        answer = self._answers[request.index] = asyncio.get_running_loop().create_future()
        try:
            await self.send(Work(request))
            return await answer
        finally:
            del self._answers[request.index]

    async def stop(self) -> None:
        """End the process; idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
            self._listener = None
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # it may still be generating an answer that nobody waits for
            process.wait()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        message = f"the process of {self._name} ended by itself"
        while (said := await self._next(reader)) is not None:
            if isinstance(said, Broken):
                message = f"{self._name} failed: {said.message}"
            elif isinstance(said, self._loaded_type):
                assert self._loaded is not None
                self._loaded.set_result(said)
            elif isinstance(said, self._answer_type) and said.index in self._answers:
                self._answers[said.index].set_result(said)
        for waiting in (self._loaded, *self._answers.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(StageFailed(message))

    async def _next(self, reader: asyncio.StreamReader) -> LoadedT | AnswerT | Broken | None:
        """The next message, None at the end of the stream."""
        try:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            said: LoadedT | AnswerT | Broken = self._decoder.decode(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return None
        return said


ProcessT = TypeVar("ProcessT", bound=ChildProcess[Any, Any, Any])


class ChildDriver(Generic[ProcessT]):
    """One way of serving with such a process: a `LoadDriver` without `take_over` and `run`."""

    def __init__(self, name: str, process: ProcessT) -> None:
        self.name = name
        self.process = process

    @property
    def startup(self) -> float:
        return self.process.startup

    async def start(self) -> None:
        await self.process.start()

    async def hand_over(self) -> None:
        """Nothing to do: the idle process waits on a socket."""

    async def stop(self) -> None:
        await self.process.stop()

    def processes(self) -> dict[int, str]:
        """The only process, with its role."""
        return {self.process.pid: "process"}
