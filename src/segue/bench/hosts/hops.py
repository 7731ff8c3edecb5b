"""Measure a hop per connector and size: a payload from this process to another one, against a bare socket and a memcpy.

Every round runs each way once, in rotating order, so that noise affects all:

    memcpy          one warm copy between two buffers
    bare socket     sendall and recv_into, over the same network
    shm             put + message + fetch, to a process on this host
    tcp, …          the same, to a process on the other host; `tcp, bfloat16` with float32 tensors sent as bfloat16

A hop ends when the consumer has the tensor. Messages go over a TCP connection of their own. All processes are on one
machine, so CLOCK_MONOTONIC is one clock.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from segue.bench.hosts.consumer import (
    NARROW,
    REQUEST_ID,
    WIDE,
    Expecting,
    Got,
    Messages,
    Raw,
    Sent,
    bytes_of,
    connector,
    probe,
    to_producer,
    tuned,
)
from segue.bench.hosts.network import Network
from segue.bench.hosts.results import BARE, MEMCPY, HopRow
from segue.connectors.base import Connector
from segue.messages.errors import ConfigError, StageFailed

WARM_UP = 5
FURTHER = ("mooncake_engine", "nixl")
"""Connectors between hosts that need packages of their own."""
_PATIENCE = 60.0
"""Seconds for the start of a consumer."""
_DISTINCT = 128
"""Whole numbers of so many values are the same in bfloat16."""
_POOL = 64 << 20
_ENDED = "the consumer of the hops ended by itself; near.log or far.log of this run has the reason"


class Link:
    """The connections to a consumer's process."""

    def __init__(self, messages: Messages, bare: socket.socket) -> None:
        self.messages = messages
        self.bare = bare

    def got(self, expected: float) -> int:
        """Return when the payload was there. Raises `StageFailed` if it was changed, or the consumer has ended."""
        said = self.messages.receive(to_producer.decode)
        if not isinstance(said, Got):
            raise StageFailed(_ENDED)
        if said.probe != expected:
            raise StageFailed(f"a payload arrived changed: its elements add up to {said.probe}, not {expected}")
        return said.at


@contextmanager
def linked(network: Network, far: bool, connectors: Sequence[str], log: Path) -> Iterator[Link]:
    """Start a consumer with these connectors, on the other host (`far`) or on this one."""
    host = network.far if far else network.near
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((network.near.address, 0)))
        listening.settimeout(_PATIENCE)
        port = str(listening.getsockname()[1])
        words = ("-m", "segue.bench.hosts.consumer", network.near.address, port, host.address, *connectors)
        process = host.start(*words, log=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        try:
            first, second = (tuned(stack.enter_context(listening.accept()[0])) for _ in range(2))
        except TimeoutError as error:
            raise StageFailed(f"the consumer of the hops did not start; {log} has the reason") from error
        messages = Messages(first)
        stack.callback(messages.close)
        yield Link(messages, second)


class Hops:
    """The producer: each method runs one way once, and returns seconds."""

    def __init__(self, size: int, near: Link, far: Link) -> None:
        """`size`: bytes, a multiple of 4."""
        self.source = (torch.arange(size // 4) % _DISTINCT).float()
        self.target = torch.zeros_like(self.source)
        self.expected = probe(self.source)
        self._near, self._far = near, far

    def memcpy(self) -> float:
        start = time.perf_counter_ns()
        self.target.copy_(self.source)
        return (time.perf_counter_ns() - start) / 1e9

    def bare(self) -> float:
        view = bytes_of(self.source)
        self._far.messages.send(Raw(len(view)))
        if not isinstance(self._far.messages.receive(to_producer.decode), Expecting):
            raise StageFailed(_ENDED)
        start = time.perf_counter_ns()
        self._far.bare.sendall(view)
        return (self._far.got(self.expected) - start) / 1e9

    def by(self, kind: str, producer: Connector, edge: tuple[str, str]) -> float:
        """A hop by a connector, whose producer this is."""
        link = self._near if producer.reach == "host" else self._far
        start = time.perf_counter_ns()
        ok, _, metadata = producer.put(*edge, REQUEST_ID, {"x": self.source})
        if not ok:
            raise StageFailed(f"the connector {kind} has no space for {self.source.nbytes} bytes")
        link.messages.send(Sent(kind, edge[1], metadata))
        seconds = (link.got(self.expected) - start) / 1e9
        producer.release(REQUEST_ID)
        return seconds

    def ways(self, producers: Mapping[str, Connector]) -> list[tuple[str, Callable[[], float]]]:
        """Every way with its name."""
        found: list[tuple[str, Callable[[], float]]] = [(MEMCPY, self.memcpy), (BARE, self.bare)]
        for kind, producer in producers.items():
            found.append((kind, partial(self.by, kind, producer, WIDE)))
            if kind == "tcp":
                found.append((f"{kind}, bfloat16", partial(self.by, kind, producer, NARROW)))
        return found


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
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        stack.callback(torch.set_num_threads, threads)
        near = stack.enter_context(linked(network, False, ["shm"], logs / "near.log"))
        remote = [kind for kind in kinds if kind != "shm"]
        far = stack.enter_context(linked(network, True, remote, logs / "far.log"))
        pool = max(_POOL, 2 * max(sizes))
        producers = {
            kind: connector(kind, f"hosts-producer-{os.getpid()}", network.near.address, pool) for kind in kinds
        }
        for producer in producers.values():
            stack.callback(producer.close)
        for size in sizes:
            ways = Hops(size, near, far).ways(producers)
            seconds: dict[str, list[float]] = {name: [] for name, _ in ways}
            for round_ in range(WARM_UP + rounds):
                for name, run in ways:
                    took = run()
                    if round_ >= WARM_UP:
                        seconds[name].append(took)
                ways.append(ways.pop(0))
            yield from rows(size, seconds)


def rows(size: int, seconds: dict[str, list[float]]) -> list[HopRow]:
    """Return the figures of every way, of the seconds of each round."""

    def ratio(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))

    return [
        HopRow(
            size,
            name,
            statistics.median(values) * 1e3,
            statistics.quantiles(values, n=10)[-1] * 1e3,
            ratio(name, BARE),
            ratio(name, MEMCPY),
        )
        for name, values in seconds.items()
    ]
