"""Measure a hop per connector and size: a payload from this process to another one, against a bare socket and a memcpy.

Every round runs each way once, in rotating order, so that noise affects all:

    memcpy          one warm copy between two buffers
    bare socket     sendall and recv_into, over the same network
    shm             put + message + fetch, to a process on this host
    tcp, …          the same, to a process on the other host; `tcp, bfloat16` with float32 tensors sent as bfloat16

A hop ends when the consumer has the tensor. Messages go over a TCP connection of their own. All processes are on one
machine, so CLOCK_MONOTONIC is one clock. `python -m segue.bench.hosts.hops HOST PORT ADDRESS CONNECTOR...` is the
consumer: it connects to the producer, takes each payload, and reports its arrival and a sum of some elements. ADDRESS:
of its host.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from segue.bench.harness.process import LENGTH, frame
from segue.bench.harness.rounds import median_ratio, milliseconds, rotated
from segue.bench.hosts.arguments import Network
from segue.bench.hosts.results import BARE, MEMCPY, HopRow
from segue.connectors.base import Arrived, Coming, Connector
from segue.connectors.create import Network as ConnectorNetwork
from segue.connectors.create import create
from segue.messages.errors import ConfigError, StageFailed

WARM_UP = 5
FURTHER = ("mooncake_engine", "nixl")
"""Connectors between hosts that need packages of their own."""
NARROW = ("a", "narrow")
"""The edge whose tensors travel as bfloat16."""
WIDE = ("a", "b")
KEY = bytes(range(32))
"""The secret of both ends: nothing else runs on their network."""
REQUEST_ID = "hop"
_PATIENCE = 60.0
"""Seconds for the start of a consumer."""
_DISTINCT = 128
"""Whole numbers of so many values are the same in bfloat16."""
_POOL = 64 << 20
_PROBE_STEP = 1 << 10
_ENDED = "the consumer of the hops ended by itself; near.log or far.log of this run has the reason"


class Raw(msgspec.Struct, tag=True):
    """To the consumer: expect so many bytes on the bare socket."""

    size: int


class Sent(msgspec.Struct, tag=True):
    """To the consumer: a payload was put."""

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


_decoder = msgspec.msgpack.Decoder[Any](Raw | Sent | Expecting | Got)


class Link:
    """One end of the two connections of producer and consumer: for messages, and the bare socket."""

    def __init__(self, messages: socket.socket, bare: socket.socket) -> None:
        for one in (messages, bare):  # they send at once, and wait as long as it takes
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.settimeout(None)
        self.bare = bare
        self._messages = messages
        self._stream = messages.makefile("rb")

    def send(self, message: msgspec.Struct) -> None:
        self._messages.sendall(frame(message))

    def receive(self) -> Any:
        """Return the next message; None at the end."""
        try:
            head = self._stream.read(LENGTH.size)
        except ConnectionResetError:
            return None
        if len(head) < LENGTH.size:
            return None
        return _decoder.decode(self._stream.read(LENGTH.unpack(head)[0]))

    def got(self, expected: float) -> int:
        """Return when the payload was there. Raises `StageFailed` if it was changed, or the consumer has ended."""
        said = self.receive()
        if not isinstance(said, Got):
            raise StageFailed(_ENDED)
        if said.probe != expected:
            raise StageFailed(f"a payload arrived changed: its elements add up to {said.probe}, not {expected}")
        return said.at

    def close(self) -> None:
        self._stream.close()
        self._messages.close()
        self.bare.close()


def connector(kind: str, name: str, address: str, pool: int = 1 << 20) -> Connector:
    """Make one end of a connector with the settings that workers have by default."""
    extra = {"pool_bytes": pool} if kind == "shm" else {}
    return create(kind, name, extra, network=ConnectorNetwork(address, KEY, frozenset([NARROW])))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def probe(tensor: torch.Tensor) -> float:
    """Return a sum of some elements, the first and the last among them."""
    return float(tensor[::_PROBE_STEP].sum() + tensor[-1])


# ── the producer ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def linked(network: Network, far: bool, connectors: Sequence[str], log: Path) -> Iterator[Link]:
    """Start a consumer with these connectors, on the other host (`far`) or on this one."""
    host = network.far if far else network.near
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((network.near.address, 0)))
        listening.settimeout(_PATIENCE)
        port = str(listening.getsockname()[1])
        words = ("-m", "segue.bench.hosts.hops", network.near.address, port, host.address, *connectors)
        process = host.start(*words, log=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        try:
            ends = [stack.enter_context(listening.accept()[0]) for _ in range(2)]
        except TimeoutError as error:
            raise StageFailed(f"the consumer of the hops did not start; {log} has the reason") from error
        link = Link(*ends)
        stack.callback(link.close)
        yield link


class Hops:
    """The producer: each method runs one way once, and returns its name and seconds."""

    def __init__(self, size: int, near: Link, far: Link) -> None:
        """`size`: bytes, a multiple of 4."""
        self.source = (torch.arange(size // 4) % _DISTINCT).float()
        self.target = torch.zeros_like(self.source)
        self.expected = probe(self.source)
        self._near, self._far = near, far

    def memcpy(self) -> dict[str, float]:
        start = time.perf_counter_ns()
        self.target.copy_(self.source)
        return {MEMCPY: (time.perf_counter_ns() - start) / 1e9}

    def bare(self) -> dict[str, float]:
        view = bytes_of(self.source)
        self._far.send(Raw(len(view)))
        if not isinstance(self._far.receive(), Expecting):
            raise StageFailed(_ENDED)
        start = time.perf_counter_ns()
        self._far.bare.sendall(view)
        return {BARE: (self._far.got(self.expected) - start) / 1e9}

    def by(self, name: str, kind: str, producer: Connector, edge: tuple[str, str]) -> dict[str, float]:
        """A hop by a connector, whose producer this is."""
        link = self._near if producer.reach == "host" else self._far
        start = time.perf_counter_ns()
        ok, _, metadata = producer.put(*edge, REQUEST_ID, {"x": self.source})
        if not ok:
            raise StageFailed(f"the connector {kind} has no space for {self.source.nbytes} bytes")
        link.send(Sent(kind, edge[1], metadata))
        seconds = (link.got(self.expected) - start) / 1e9
        producer.release(REQUEST_ID)
        return {name: seconds}

    def ways(self, producers: Mapping[str, Connector]) -> Iterator[Callable[[], dict[str, float]]]:
        yield self.memcpy
        yield self.bare
        for kind, producer in producers.items():
            yield partial(self.by, kind, kind, producer, WIDE)
            if kind == "tcp":
                yield partial(self.by, f"{kind}, bfloat16", kind, producer, NARROW)


def usable(network: Network) -> list[str]:
    """Return the connectors that can be measured here."""
    found = ["shm", "tcp"]
    if network.apart:  # Mooncake listens on every interface: only where nobody else reaches it
        for kind in FURTHER:
            with suppress(ConfigError):  # it is not installed
                connector(kind, "", network.near.address).close()
                found.append(kind)
    return found


def measure(network: Network, sizes: Sequence[int], rounds: int, kinds: Sequence[str], logs: Path) -> Iterator[HopRow]:
    """Run `rounds` rounds with payloads of each of `sizes`, in bytes. `kinds`: of `usable`; `logs`: of consumers."""
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        near = stack.enter_context(linked(network, False, ["shm"], logs / "near.log"))
        remote = [kind for kind in kinds if kind != "shm"]
        far = stack.enter_context(linked(network, True, remote, logs / "far.log"))
        name, pool = f"hosts-producer-{os.getpid()}", max(_POOL, 2 * max(sizes))
        producers = {kind: connector(kind, name, network.near.address, pool) for kind in kinds}
        for producer in producers.values():
            stack.callback(producer.close)
        for size in sizes:
            seconds = rotated(Hops(size, near, far).ways(producers), WARM_UP, rounds)
            for way, own in seconds.items():
                ratios = [median_ratio(own, seconds[other]) for other in (BARE, MEMCPY)]
                yield HopRow(size, way, *milliseconds(own), *ratios)


# ── the consumer ─────────────────────────────────────────────────────────────────────────────────────────────────────


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
    link = Link(*(socket.create_connection((host, int(port)), _PATIENCE) for _ in range(2)))
    connectors = {kind: connector(kind, f"hosts-consumer-{os.getpid()}", address) for kind in kinds}
    buffer = torch.empty(0)
    while (message := link.receive()) is not None:
        if isinstance(message, Raw):
            if 4 * len(buffer) != message.size:
                buffer = torch.zeros(message.size // 4)
            view, have = bytes_of(buffer), 0
            link.send(Expecting())
            while have < message.size:
                got = link.bare.recv_into(view[have:])
                if got == 0:
                    return  # the producer has ended
                have += got
            link.send(Got(time.perf_counter_ns(), probe(buffer)))
            continue
        found = connectors[message.connector]
        tensor = take(found, message.target, message.metadata)
        at = time.perf_counter_ns()
        link.send(Got(at, probe(tensor)))
        del tensor
        found.release(REQUEST_ID)
    for one in connectors.values():
        one.close()


if __name__ == "__main__":
    main(sys.argv[1:])
