"""A rival's library in a process of its own, with both ends of the connection: length-prefixed msgpack on a socket
pair.

In the process a thread reads messages into a queue; the main thread takes waiting requests, serves them, answers, and
repeats.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import msgspec

import segue
from segue.bench.harness.load import Numbered
from segue.messages.errors import StageFailed
from segue.orchestrator.workers.placement import WORKER_ENVIRONMENT

LENGTH = struct.Struct("<I")

GATHER_SECONDS = 0.05
_encoder = msgspec.msgpack.Encoder()


class Loading(Protocol):
    """Options that every such process has."""

    @property
    def threads(self) -> int: ...


class ModelOptions(msgspec.Struct, kw_only=True):
    """Options for loading a model; a process receives them as JSON in `argv`."""

    model_dir: str
    dtype: str
    threads: int


class Loaded(msgspec.Struct, tag=True):
    """The model is loaded."""


PolicyT = TypeVar("PolicyT", bound=msgspec.Struct)
OptionsT = TypeVar("OptionsT", bound=Loading)
RequestT = TypeVar("RequestT", bound=Numbered)
LoadedT = TypeVar("LoadedT")
AnswerT = TypeVar("AnswerT", bound=Numbered)
OutcomeT = TypeVar("OutcomeT")


class Work(msgspec.Struct, Generic[RequestT], tag=True):
    """One request to serve."""

    request: RequestT


class Policy(msgspec.Struct, tag=True):
    """Sets the way of serving from now on."""

    way: str
    """`one`: one request at a time; other ways are the library's own."""
    most: int
    """Maximum requests per call."""
    gather: float
    """Seconds to wait for a batch to fill after its first request. Clients answered by one batch send their next
    requests within milliseconds of each other: without waiting, each batch would start with the first request alone."""


class Broken(msgspec.Struct, tag=True):
    """The process failed and cannot continue."""

    message: str


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message for sending."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


class Channel(Generic[PolicyT, RequestT]):
    """The baseline's end of the connection."""

    def __init__(self, end: socket.socket, policy: type[PolicyT], request: type[RequestT]) -> None:
        self._end = end
        self._decoder = msgspec.msgpack.Decoder(policy | Work[request])  # type: ignore[valid-type]
        self._inbox: SimpleQueue[PolicyT | Work[RequestT] | None] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: msgspec.Struct) -> None:
        self._end.sendall(frame(message))

    def take(self) -> PolicyT | Work[RequestT] | None:
        """The next message; None: the benchmark has ended."""
        return self._inbox.get()

    def gather(self, first: RequestT, most: int, seconds: float) -> list[RequestT]:
        """The first request and those that wait or arrive within `seconds`, up to `most`."""
        batch = [first]
        until = time.monotonic() + seconds
        while len(batch) < most:
            try:
                message = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                break
            assert isinstance(message, Work), "the policy changes only while no request is running"
            batch.append(message.request)
        return batch

    def _read(self) -> None:
        stream = self._end.makefile("rb")
        while len(head := stream.read(LENGTH.size)) == LENGTH.size:
            (length,) = LENGTH.unpack(head)
            self._inbox.put(self._decoder.decode(stream.read(length)))
        self._inbox.put(None)


def serve(
    argv: list[str],
    options: type[OptionsT],
    policy: type[PolicyT],
    request: type[RequestT],
    run: Callable[[Channel[PolicyT, RequestT], OptionsT], None],
) -> int:
    """The main function of a baseline's process: `argv` is its socket's number and its options as JSON."""
    descriptor, given = argv
    loading = msgspec.json.decode(given, type=options)
    # before importing torch, whose thread pools read it at import
    os.environ["OMP_NUM_THREADS"] = str(loading.threads)
    channel = Channel(socket.socket(fileno=int(descriptor)), policy, request)
    try:
        run(channel, loading)
    # the benchmark waits for an answer, so it must receive any exception of the library
    except Exception as error:
        channel.send(Broken(f"{type(error).__name__}: {error}"))
        raise
    return 0


Generate = Callable[[Sequence[RequestT]], Iterable[msgspec.Struct]]
"""Serves requests as one batch, and returns or yields their answers."""


def serve_batches(
    argv: list[str],
    options: type[OptionsT],
    request: type[RequestT],
    load: Callable[[OptionsT], tuple[msgspec.Struct, Callable[[str], Generate[RequestT]]]],
) -> int:
    """The main function of a process for `ReferenceDriver`. `load`: loads the model, and returns a message on it and a
    function that begins a turn with a way of serving."""

    def run(channel: Channel[Policy, RequestT], given: OptionsT) -> None:
        loaded, begin = load(given)
        channel.send(loaded)
        policy = Policy("one", 1, 0.0)
        generate = begin(policy.way)
        while (message := channel.take()) is not None:
            if isinstance(message, Policy):
                policy, generate = message, begin(message.way)
                continue
            for answer in generate(channel.gather(message.request, policy.most, policy.gather)):
                channel.send(answer)

    return serve(argv, options, Policy, request, run)


# --- the benchmark's end


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
    """A process shared by the sides of one benchmark, so that the model is loaded once."""

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
        self.last: AnswerT | None = None
        """The latest answer."""

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
            self.last = await answer
            return self.last
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


class ReferenceDriver(Generic[RequestT, LoadedT, AnswerT, OutcomeT]):
    """One way of serving with such a process, as a side of a benchmark. JCT is measured here, so it includes waiting in
    the process's queue."""

    def __init__(
        self,
        name: str,
        process: ChildProcess[RequestT, LoadedT, AnswerT],
        way: str,
        outcome: Callable[[RequestT, AnswerT, float, float], OutcomeT],
        *,
        most: int | None = None,
        gather: float = GATHER_SECONDS,
    ) -> None:
        """`outcome`: makes the outcome from request, answer, and the times of sending and of receiving. A batch is as
        large as the number of clients, up to `most`; one that is not full waits `gather` seconds for others."""
        self.name = name
        self.process = process
        self._way, self._most, self._gather = way, most, gather
        self._outcome = outcome

    @property
    def startup(self) -> float:
        return self.process.startup

    async def start(self) -> None:
        await self.process.start()

    async def take_over(self, together: int) -> None:
        """Set the process's way of serving."""
        most = 1 if self._way == "one" else min(together, self._most or together)
        await self.process.send(Policy(self._way, most, self._gather if most > 1 else 0.0))

    async def hand_over(self) -> None:
        """Nothing to do: the idle process waits on a socket."""

    async def run(self, request: RequestT) -> OutcomeT:
        sent = time.monotonic()
        answer = await self.process.ask(request)
        return self._outcome(request, answer, sent, time.monotonic())

    async def stop(self) -> None:
        await self.process.stop()

    def processes(self) -> dict[int, str]:
        """The only process, with its role."""
        return {self.process.pid: "process"}
