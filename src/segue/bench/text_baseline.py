"""The `transformers` baselines of `segue bench text`: one process, served in several ways."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

import segue
from segue.bench.text_wire import Answer, Broken, Loaded, Options, Policy, ToReference, Work, frame, read_frame
from segue.bench.text_workload import TextOutcome, TextRequest
from segue.messages.errors import StageFailed

GATHER_SECONDS = 0.05
# the child runs this very package, installed or not
_PATHS = (str(Path(segue.__file__).parents[1]), os.environ.get("PYTHONPATH"))


class ReferenceProcess:
    """The process, shared by the drivers below: the model is loaded once."""

    def __init__(self, options: Options, environment: Mapping[str, str]) -> None:
        self._options = options
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._loaded: asyncio.Future[Loaded] | None = None
        self.startup = 0.0

    async def start(self) -> None:
        """Returns when the model is there; once, whoever asks. Raises `StageFailed` with the process's own error."""
        if self._loaded is None:
            began = time.monotonic()
            self._loaded = asyncio.get_running_loop().create_future()
            ours, theirs = socket.socketpair()
            with theirs:
                options = msgspec.json.encode(self._options).decode()
                paths = os.pathsep.join(path for path in _PATHS if path)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "segue.bench.text_reference", str(theirs.fileno()), options],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": paths, **self._environment},
                )
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._listener = asyncio.create_task(self._listen(reader))
            await asyncio.shield(self._loaded)
            self.startup = time.monotonic() - began
        await asyncio.shield(self._loaded)

    async def send(self, message: ToReference) -> None:
        assert self._writer is not None, "not started"
        self._writer.write(frame(message))
        await self._writer.drain()

    async def ask(self, request: TextRequest) -> Answer:
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
            process.kill()  # it may be in the middle of a generation that nobody waits for
            process.wait()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        message = "the process of transformers ended by itself"
        while (said := await read_frame(reader)) is not None:
            match said:
                case Loaded():
                    assert self._loaded is not None
                    self._loaded.set_result(said)
                case Answer():
                    if said.index in self._answers:
                        self._answers[said.index].set_result(said)
                case Broken():
                    message = f"transformers failed: {said.message}"
        for waiting in (self._loaded, *self._answers.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(StageFailed(message))


NAMES = {
    "one": "transformers one at a time",
    "static": "transformers static batches",
    "continuous": "transformers generate_batch",
}


class ReferenceDriver:
    """One way of serving with the process."""

    def __init__(self, process: ReferenceProcess, way: str) -> None:
        """`way`: of `NAMES`."""
        self.name = NAMES[way]
        self._way = way
        self._process = process

    @property
    def startup(self) -> float:
        return self._process.startup

    async def start(self) -> None:
        await self._process.start()

    async def take_over(self, together: int) -> None:
        """From now on the process serves like this; a batch is as large as there are clients."""
        most = 1 if self._way == "one" else together
        await self._process.send(Policy(self._way, most, GATHER_SECONDS if most > 1 else 0.0))

    async def hand_over(self) -> None:
        """Nothing to do: the process waits on a pipe."""

    async def run(self, request: TextRequest) -> TextOutcome:
        sent = time.monotonic()
        answer = await self._process.ask(request)
        return TextOutcome(
            index=request.index,
            prompt_tokens=len(request.prompt),
            # what a server around it could have sent on: it is not held against the library that none is
            times=[at - sent for at in answer.times],
            jct=time.monotonic() - sent,
            token_ids=answer.token_ids,
        )

    async def stop(self) -> None:
        await self._process.stop()
