"""The consumer of `segue.bench.hosts.hops`: take each payload, report its arrival and a sum of some elements.

`python -m segue.bench.hosts.consumer HOST PORT ADDRESS CONNECTOR...` connects to the producer twice, for messages and
for the bare socket. ADDRESS: of this host.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch

from segue.bench.harness.process import LENGTH, frame
from segue.connectors.base import Arrived, Coming, Connector
from segue.connectors.create import Network, create

NARROW = ("a", "narrow")
"""The edge whose tensors travel as bfloat16."""
WIDE = ("a", "b")
KEY = bytes(range(32))
"""The secret of both ends: nothing else runs on their network."""
REQUEST_ID = "hop"
_CONNECT_SECONDS = 60.0
_STEP = 1 << 10

MessageT = TypeVar("MessageT")


class Raw(msgspec.Struct, tag=True):
    """Expect so many bytes on the bare socket."""

    size: int


class Sent(msgspec.Struct, tag=True):
    """A payload was put."""

    connector: str
    target: str
    """`NARROW` or `WIDE` names its edge."""
    metadata: dict[str, Any] | None


class Expecting(msgspec.Struct, tag=True):
    """The consumer reads the bare socket."""


class Got(msgspec.Struct, tag=True):
    """A payload is there as tensors."""

    at: int
    """time.perf_counter_ns(), one clock for both processes."""
    probe: float


class Messages:
    """Both ends of a connection for messages."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._stream = sock.makefile("rb")

    def send(self, message: msgspec.Struct) -> None:
        self._sock.sendall(frame(message))

    def receive(self, kind: Callable[[bytes], MessageT]) -> MessageT | None:
        """Return the next message, decoded by `kind`; None at the end."""
        try:
            head = self._stream.read(LENGTH.size)
        except ConnectionResetError:
            return None
        if len(head) < LENGTH.size:
            return None
        return kind(self._stream.read(LENGTH.unpack(head)[0]))

    def close(self) -> None:
        self._stream.close()
        self._sock.close()


to_consumer = msgspec.msgpack.Decoder[Any](Raw | Sent)
to_producer = msgspec.msgpack.Decoder[Any](Expecting | Got)


def tuned(sock: socket.socket) -> socket.socket:
    """Have a socket send at once, and wait as long as it takes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(None)
    return sock


def connector(kind: str, name: str, address: str, pool: int = 1 << 20) -> Connector:
    """Make one end of a connector with the settings that workers have by default."""
    extra = {"pool_bytes": pool} if kind == "shm" else {}
    return create(kind, name, extra, network=Network(address, KEY, frozenset([NARROW])))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def probe(tensor: torch.Tensor) -> float:
    """Return a sum of some elements, the first and the last among them."""
    return float(tensor[::_STEP].sum() + tensor[-1])


def take(found: Connector, target: str, metadata: dict[str, Any] | None) -> torch.Tensor:
    """Return the payload's tensor, as a worker gets it: by asking again when it is woken."""
    landed = threading.Event()
    while True:
        got = found.fetch("a", target, REQUEST_ID, metadata, landed.set)
        if isinstance(got, Arrived):
            tensor: torch.Tensor = got.payload["x"]
            return tensor
        if not isinstance(got, Coming):
            raise RuntimeError(f"the payload was lost: {got.reason}")
        landed.wait()
        landed.clear()


def main(argv: list[str]) -> None:
    host, port, address, *kinds = argv
    torch.set_num_threads(1)
    ends = [tuned(socket.create_connection((host, int(port)), _CONNECT_SECONDS)) for _ in range(2)]
    messages, bare = Messages(ends[0]), ends[1]
    connectors = {kind: connector(kind, f"hosts-consumer-{os.getpid()}", address) for kind in kinds}
    buffer = torch.empty(0)
    while (message := messages.receive(to_consumer.decode)) is not None:
        if isinstance(message, Raw):
            if 4 * len(buffer) != message.size:
                buffer = torch.zeros(message.size // 4)
            view, have = bytes_of(buffer), 0
            messages.send(Expecting())
            while have < message.size:
                got = bare.recv_into(view[have:])
                if got == 0:
                    return  # the producer has ended
                have += got
            messages.send(Got(time.perf_counter_ns(), probe(buffer)))
            continue
        found = connectors[message.connector]
        tensor = take(found, message.target, message.metadata)
        at = time.perf_counter_ns()
        messages.send(Got(at, probe(tensor)))
        del tensor
        found.release(REQUEST_ID)
    for one in connectors.values():
        one.close()


if __name__ == "__main__":
    main(sys.argv[1:])
