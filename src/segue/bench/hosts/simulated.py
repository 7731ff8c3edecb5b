"""Simulated workers: a process that answers, for many workers, what the orchestrator sends them, at once.

`python -m segue.bench.hosts.simulated STEPS` reads workers from its standard input, a JSON object per line
(`Simulated`), until that ends. Each has its own inbox and its own connection to the orchestrator, as real workers have.
The stages of a request are answered when all have been begun: a `Begin` names its neighbours, not the worker that gets
it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from segue.messages.deltas import AudioDelta, TextDelta
from segue.messages.wire import (
    Emission,
    InputDone,
    OutputEnd,
    Progress,
    Ready,
    StageDone,
    StageFacts,
    ToOrchestrator,
    encode,
)

READ, WRITE, SPEAK = CHAIN = ("input", "write", "speak")
"""The stages of a request: input, autoregressive, module."""
_ROUND = 256
"""Messages that are answered before the standard input is looked at."""
_SAMPLES = bytes(4 * 240)
_RATE = 24_000


class Simulated(msgspec.Struct):
    """One worker, as its `WorkerSpec` has it."""

    worker: str
    stages: list[str]
    inbox: str
    orchestrator: str


class _Request(msgspec.Struct):
    request_id: str


class _Peer(msgspec.Struct):
    stage: str
    worker: str


class _Begin(msgspec.Struct, tag="Begin"):
    """What is needed of a `Begin`."""

    request: _Request
    stage: str
    attempt: int
    upstreams: list[_Peer]
    downstreams: list[_Peer]


class _Drop(msgspec.Struct, tag="Drop"):
    """The request is over."""


class _Shutdown(msgspec.Struct, tag="Shutdown"):
    """The end of the standard input comes next."""


_decoder = msgspec.msgpack.Decoder(_Begin | _Drop | _Shutdown)


class Workers:
    """All simulated workers."""

    def __init__(self, steps: int) -> None:
        """`steps`: emissions of the autoregressive stage per request."""
        self._steps = steps
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self.inbox = self._socket(zmq.PULL)
        """That of all: it is bound to every worker's endpoint."""
        self._out: dict[str, zmq.Socket[bytes]] = {}
        self._begun: dict[str, dict[str, _Begin]] = {}
        """Requests of which not every stage has begun."""

    def add(self, worker: Simulated) -> None:
        """Start a worker."""
        self.inbox.bind(worker.inbox)
        out = self._out[worker.worker] = self._socket(zmq.PUSH)
        out.connect(worker.orchestrator)
        out.send(encode(Ready(worker.worker, {stage: StageFacts() for stage in worker.stages}, worker.inbox)))

    def receive(self, data: bytes) -> None:
        """Answer a message."""
        message = _decoder.decode(data)
        if not isinstance(message, _Begin):
            return
        request_id = message.request.request_id
        begun = self._begun.setdefault(request_id, {})
        begun[message.stage] = message
        if len(begun) < len(CHAIN):
            return
        del self._begun[request_id]
        workers = {peer.stage: peer.worker for one in begun.values() for peer in (*one.upstreams, *one.downstreams)}
        for stage in CHAIN:
            send = self._out[workers[stage]].send
            for said in self._answers(workers[stage], request_id, stage, begun[stage].attempt):
                send(encode(said))

    def close(self) -> None:
        for socket in (self.inbox, *self._out.values()):
            socket.close(linger=0)
        self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        return socket

    def _answers(self, worker: str, request_id: str, stage: str, attempt: int) -> Iterator[ToOrchestrator]:
        """Yield what a worker says of a request, in its order."""
        about = (request_id, stage, attempt)
        if stage != READ:
            yield InputDone(worker, *about, READ if stage == WRITE else WRITE)
        if stage == WRITE:
            for step in range(self._steps):
                text = TextDelta(stage, "a", [step], start=step, first_id=step)
                yield Progress(worker, [Emission(*about, units=[step], first_index=step, deltas=[text])])
        if stage == SPEAK:
            yield Progress(worker, [Emission(*about, deltas=[AudioDelta(stage, _SAMPLES, _RATE)])])
        yield StageDone(worker, *about, [OutputEnd(0, "stop")], 0.0, 0.0, 0.0)


def main(argv: list[str]) -> None:
    [steps] = argv
    workers = Workers(int(steps))
    poller = zmq.Poller()
    poller.register(workers.inbox, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    line = b""
    while True:
        for source, _ in poller.poll():
            if source is not workers.inbox:
                if not (data := os.read(sys.stdin.fileno(), 1 << 16)):
                    workers.close()
                    return
                *lines, line = (line + data).split(b"\n")
                for one in lines:
                    workers.add(msgspec.json.decode(one, type=Simulated))
                continue
            for _ in range(_ROUND):
                try:
                    data = workers.inbox.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                workers.receive(data)


if __name__ == "__main__":
    main(sys.argv[1:])
