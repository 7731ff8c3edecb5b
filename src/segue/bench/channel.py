"""What the benchmark and the process of a baseline talk over, msgpack behind a length on a socket pair; and that
process's end of it.

A thread reads what arrives into a queue; the main thread takes what waits, serves it, answers, and takes again.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

import msgspec

LENGTH = struct.Struct("<I")

PolicyT = TypeVar("PolicyT", bound=msgspec.Struct)
RequestT = TypeVar("RequestT")
_encoder = msgspec.msgpack.Encoder()


class Work(msgspec.Struct, Generic[RequestT], tag=True):
    """One request to serve."""

    request: RequestT


class Broken(msgspec.Struct, tag=True):
    """The process cannot go on."""

    message: str


class Loading(Protocol):
    """What every baseline's options say."""

    @property
    def threads(self) -> int: ...


OptionsT = TypeVar("OptionsT", bound=Loading)


def frame(message: msgspec.Struct) -> bytes:
    """A message as it is sent."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


class Channel(Generic[PolicyT, RequestT]):
    """The baseline's end."""

    def __init__(self, end: socket.socket, policy: type[PolicyT], request: type[RequestT]) -> None:
        self._end = end
        self._decoder = msgspec.msgpack.Decoder(policy | Work[request])  # type: ignore[valid-type]
        self._inbox: SimpleQueue[PolicyT | Work[RequestT] | None] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: msgspec.Struct) -> None:
        self._end.sendall(frame(message))

    def take(self) -> PolicyT | Work[RequestT] | None:
        """What came next; None: the benchmark is over."""
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
            assert isinstance(message, Work), "the policy changes only while nothing is under way"
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
    """The main function of a baseline: `argv` is the number of its socket and its options as JSON."""
    descriptor, given = argv
    loading = msgspec.json.decode(given, type=options)
    # before torch is imported: the thread pools read it then
    os.environ["OMP_NUM_THREADS"] = str(loading.threads)
    channel = Channel(socket.socket(fileno=int(descriptor)), policy, request)
    try:
        run(channel, loading)
    # whatever the library raises, the benchmark must hear of it: it waits for an answer
    except Exception as error:
        channel.send(Broken(f"{type(error).__name__}: {error}"))
        raise
    return 0
