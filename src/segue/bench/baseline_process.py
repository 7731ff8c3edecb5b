"""`python -m segue.bench.baseline_process SOCKET_FD OPTIONS`: the baseline, alone in its process.

A thread reads what arrives into a queue; the main thread takes what waits, serves it, answers, and takes again: one
request at a time, or up to `Policy.max_batch` together.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from importlib.metadata import version
from queue import Empty, SimpleQueue
from typing import BinaryIO

import msgspec

from segue.bench.baseline_wire import LENGTH, Broken, Loaded, Options, Policy, ToBaseline, Work, frame, to_baseline
from segue.bench.workload import BenchRequest

Inbox = SimpleQueue[ToBaseline | None]


def main(argv: list[str]) -> int:
    descriptor, given = argv
    channel = socket.socket(fileno=int(descriptor))
    options = msgspec.json.decode(given, type=Options)
    # before torch is imported: the thread pools read it then
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    try:
        _serve(channel, options)
    # whatever the library raises, the benchmark must hear of it: it waits for an answer
    except Exception as error:
        channel.sendall(frame(Broken(f"{type(error).__name__}: {error}")))
        raise
    return 0


def _serve(channel: socket.socket, options: Options) -> None:
    began = time.monotonic()
    from segue.bench.reference import Reference, torch

    reference = Reference(options)
    versions = {name: version(name) for name in ("torch", "transformers")}
    loading = time.monotonic() - began
    channel.sendall(frame(Loaded(torch.get_num_threads(), loading, versions, reference.gpu_bytes())))
    inbox: Inbox = SimpleQueue()
    threading.Thread(target=_read, args=(channel.makefile("rb"), inbox), daemon=True).start()
    policy = Policy(1, 0.0)
    while (message := inbox.get()) is not None:
        if isinstance(message, Policy):
            policy = message
            continue
        for answer in reference.generate(_gather(inbox, message.request, policy)):
            channel.sendall(frame(answer))


def _gather(inbox: Inbox, first: BenchRequest, policy: Policy) -> list[BenchRequest]:
    """The first request and those that wait or arrive within `gather` seconds, up to the batch's size."""
    batch = [first]
    until = time.monotonic() + policy.gather
    while len(batch) < policy.max_batch:
        try:
            message = inbox.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            break
        assert isinstance(message, Work), "the policy changes only while nothing is under way"
        batch.append(message.request)
    return batch


def _read(stream: BinaryIO, inbox: Inbox) -> None:
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        inbox.put(to_baseline.decode(stream.read(length)))
    inbox.put(None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
