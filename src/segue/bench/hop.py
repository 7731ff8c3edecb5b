"""What a hop costs: a payload from worker to worker through shared memory, against one memcpy of the same size.

    python -m segue.bench.hop [--mib 10] [--rounds 100] [--json FILE]

Two processes, one torch thread each. Every round does each thing once, in an order that turns, so that noise
falls on all:

    memcpy     one warm copy between two buffers that have been touched before
    put        the producer's part of the hop: lay out, copy in
    hop        put + control message (a Unix socket) + get: until the consumer has the payload's tensors in hand
    in place   the same where the producer has computed into the slot: reserve + control message + get

Times are CLOCK_MONOTONIC, one clock for both processes. The consumer adds up a few elements of what it got, so that a
hop that loses bytes is noticed.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from segue.bench.child import python_path
from segue.bench.hardware import Machine, machine
from segue.cli_parser import Parser
from segue.connectors.shm import SharedMemoryConnector

WARM_UP = 10
_PACKET = 1 << 16


def consume(control: socket.socket) -> None:
    """The consumer's process: take each payload, say when it was there and what it holds, release it."""
    torch.set_num_threads(1)
    connector = SharedMemoryConnector(f"hop-consumer-{os.getpid()}", pool_bytes=1 << 20)
    while packet := control.recv(_PACKET):
        found = connector.get("a", "b", "hop", msgspec.msgpack.decode(packet))
        now = time.perf_counter_ns()
        assert found is not None, "the payload was lost"
        probe = int(found[0]["x"][:: 1 << 18].sum())
        del found
        connector.release("hop")
        control.send(msgspec.msgpack.encode((now, probe)))
    connector.close()


class Hop:
    """The producer's process: each method does one thing once and returns seconds."""

    def __init__(self, size: int, connector: SharedMemoryConnector, control: socket.socket) -> None:
        self.source = torch.arange(size // 8)
        self.target = torch.zeros_like(self.source)
        self.expected = int(self.source[:: 1 << 18].sum())
        self.connector = connector
        self.control = control

    def memcpy(self) -> dict[str, float]:
        """One copy of the payload's size."""
        start = time.perf_counter_ns()
        self.target.copy_(self.source)
        return {"memcpy": (time.perf_counter_ns() - start) / 1e9}

    def hop(self) -> dict[str, float]:
        """One copy in, a message, a view out."""
        start = time.perf_counter_ns()
        ok, _, metadata = self.connector.put("a", "b", "hop", {"x": self.source})
        put = time.perf_counter_ns()
        assert ok, "the pool was full"
        return {"put": (put - start) / 1e9, "hop": (self._arrival(metadata) - start) / 1e9}

    def in_place(self) -> dict[str, float]:
        """No copy: the producer's result is in the slot already."""
        start = time.perf_counter_ns()
        found = self.connector.reserve("a", "b", "hop", {"x": self.source})
        assert found is not None, "the pool was full"
        reserved = time.perf_counter_ns()
        found[0]["x"].copy_(self.source)  # stands for the computation; not counted
        written = time.perf_counter_ns()
        return {"in place": (self._arrival(found[2]) - written + reserved - start) / 1e9}

    def _arrival(self, metadata: dict[str, Any] | None) -> int:
        self.control.send(msgspec.msgpack.encode(metadata))
        arrived, probe = msgspec.msgpack.decode(self.control.recv(_PACKET))
        assert probe == self.expected, "the payload arrived changed"
        return arrived


def measure(size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round after the warm-up, by what was done. `size` in bytes."""
    torch.set_num_threads(1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    consumer = subprocess.Popen(
        [sys.executable, "-m", "segue.bench.hop", "--consume", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    theirs.close()
    connector = SharedMemoryConnector(f"hop-producer-{os.getpid()}", pool_bytes=max(64 << 20, 2 * size))
    seconds: dict[str, list[float]] = {"memcpy": [], "put": [], "hop": [], "in place": []}
    try:
        hop = Hop(size, connector, ours)
        steps: list[Callable[[], dict[str, float]]] = [hop.memcpy, hop.hop, hop.in_place]
        for round_ in range(WARM_UP + rounds):
            for step in steps:
                for name, value in step().items():
                    if round_ >= WARM_UP:
                        seconds[name].append(value)
            steps.append(steps.pop(0))
    finally:
        ours.close()
        consumer.wait()
        connector.close()
    return seconds


def report(size: int, seconds: dict[str, list[float]], hardware: Machine) -> dict[str, Any]:
    """Medians in milliseconds and in copies: the median, over rounds, of time over that round's memcpy."""
    rows = {}
    for name, values in seconds.items():
        ratios = [value / copy for value, copy in zip(values, seconds["memcpy"], strict=True)]
        rows[name] = {
            "median_ms": statistics.median(values) * 1e3,
            "p90_ms": statistics.quantiles(values, n=10)[-1] * 1e3,
            "copies": statistics.median(ratios),
        }
    return {"bytes": size, "rounds": len(seconds["memcpy"]), "threads": 1, "hardware": hardware, "rows": rows}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = Parser(prog="python -m segue.bench.hop", description="the cost of a hop between workers")
    parser.add_argument("--mib", type=float, default=10.0, help="size of the payload (default: 10)")
    parser.add_argument("--rounds", type=int, default=100, help="rounds after the warm-up, at least 2 (default: 100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the hardware here")
    parser.add_argument("--consume", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.consume is not None:
        with socket.socket(fileno=options.consume) as control:
            consume(control)
        return
    if options.rounds < 2 or options.mib <= 0:
        parser.error(f"--rounds {options.rounds} --mib {options.mib}: needs at least 2 rounds and a size above 0")
    size = int(options.mib * 2**20) // 8 * 8
    found = machine()
    result = report(size, measure(size, options.rounds), found)
    print(f"{options.mib:g} MiB, {options.rounds} rounds, 1 thread a side, {found.cpu}")
    print(f"{'':10}{'median ms':>12}{'p90 ms':>12}{'copies':>10}")
    for name, row in result["rows"].items():
        print(f"{name:10}{row['median_ms']:12.3f}{row['p90_ms']:12.3f}{row['copies']:10.2f}")
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


if __name__ == "__main__":
    main()
