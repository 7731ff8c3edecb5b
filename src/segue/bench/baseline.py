"""The baselines: `transformers` in a process of its own, one request at a time or in static batches.

Requests go to it over a socket pair the moment a client sends them, and wait there; JCT is taken at the client and so
includes that queue. The audio is there when `generate` returns, so its time to first audio is its JCT; the first token
of the reply is noted by a streamer that `generate` hands on to the thinker, and counted from when the client sent the
request, though it reaches nobody before the end.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

import segue
from segue.bench.baseline_wire import Answer, Broken, Loaded, Options, Policy, ToBaseline, Work, frame, read_frame
from segue.bench.driver import FirstAudio, Outcome
from segue.bench.workload import BenchRequest
from segue.messages.errors import StageFailed

GATHER_SECONDS = 0.05
# the child runs this very package, installed or not
_PATHS = (str(Path(segue.__file__).parents[1]), os.environ.get("PYTHONPATH"))


class BaselineProcess:
    """The process, shared by the drivers below: the model is loaded once."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._loaded: asyncio.Future[Loaded] | None = None
        self.gpu_bytes = 0

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def start(self) -> Loaded:
        """Returns when the model is there; once, whoever asks. Raises `StageFailed` with the process's own error."""
        if self._loaded is None:
            self._loaded = asyncio.get_running_loop().create_future()
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "segue.bench.baseline_process",
                        str(theirs.fileno()),
                        msgspec.json.encode(self._options).decode(),
                    ],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, _PATHS))},
                )
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._listener = asyncio.create_task(self._listen(reader))
        return await self._loaded

    async def send(self, message: ToBaseline) -> None:
        assert self._writer is not None, "not started"
        self._writer.write(frame(message))
        await self._writer.drain()

    async def ask(self, request: BenchRequest) -> Answer:
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
        message = "the process of the baseline ended by itself"
        while (said := await read_frame(reader)) is not None:
            match said:
                case Loaded():
                    assert self._loaded is not None
                    self._loaded.set_result(said)
                case Answer():
                    self.gpu_bytes = said.gpu_bytes
                    self._answers[said.index].set_result(said)
                case Broken():
                    message = f"the baseline failed: {said.message}"
        for waiting in (self._loaded, *self._answers.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(StageFailed(message))


class BaselineDriver:
    """One way of serving with the baseline's process."""

    def __init__(self, process: BaselineProcess, name: str, max_batch: int, silence: float) -> None:
        """`max_batch` 1: one request at a time."""
        self.name = name
        self._process = process
        self._policy = Policy(max_batch, GATHER_SECONDS if max_batch > 1 else 0.0)
        self._silence = silence

    async def start(self) -> None:
        await self._process.start()

    async def take_over(self) -> None:
        """From now on the process serves like this."""
        await self._process.send(self._policy)

    async def run(self, request: BenchRequest) -> Outcome:
        sent = time.monotonic()
        answer = await self._process.ask(request)
        came = time.monotonic()
        samples = np.frombuffer(answer.samples, dtype="<f4")
        first = FirstAudio(self._silence)
        first.add(samples, answer.sample_rate, came)
        return Outcome(
            index=request.index,
            kind=request.kind,
            jct=came - sent,
            ttft=answer.first_token - sent,
            ttfa=float("inf") if first.at is None else first.at - sent,
            audio_seconds=len(samples) / answer.sample_rate,
            prompt_tokens=answer.prompt_tokens,
            text_ids=answer.text_ids,
            codes=len(answer.code_ids),
            code_ids=answer.code_ids,
            batch=answer.batch,
            rms=first.rms,
            spans=_spans(answer, sent),
        )

    async def stop(self) -> None:
        await self._process.stop()

    def pids(self) -> list[int]:
        return [self._process.pid]


def _spans(answer: Answer, sent: float) -> list[tuple[str, str, float, float]]:
    marks: Sequence[tuple[str, float]] = (
        ("queue", answer.began),
        ("input", answer.prepared),
        ("thinker", answer.thinker_done),
        ("talker", answer.talker_done),
        ("vocoder", answer.done),
    )
    spans, start = [], sent
    for stage, end in marks:
        spans.append((stage, "waiting" if stage == "queue" else "busy", start - sent, end - sent))
        start = end
    return spans
