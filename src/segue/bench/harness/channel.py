"""The connection between a benchmark and the process of a baseline (length-prefixed msgpack on a socket pair), and that
process's end of it.

A thread reads messages into a queue; the main thread takes waiting requests, serves them, answers, and repeats.
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
    """The process failed and cannot continue."""

    message: str


class Loading(Protocol):
    """Options that every baseline has."""

    @property
    def threads(self) -> int: ...


OptionsT = TypeVar("OptionsT", bound=Loading)


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
