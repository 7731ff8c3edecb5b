"""Measure a hop: a payload from worker to worker through shared memory, against one memcpy of the same size.

    python -m segue.bench.hop [--mib 10] [--rounds 100] [--json FILE]

Two processes, one torch thread each. Every round runs each operation once, in rotating order, so that noise affects
all:

    memcpy     one warm copy between two buffers that have been touched before
    put        the producer's part of the hop: lay out, copy in
    hop        put + control message (a Unix socket) + get: until the consumer has the payload's tensors
    in place   the same if the producer has computed into the slot: reserve + control message + get

Times are CLOCK_MONOTONIC, one clock for both processes. The consumer sums a few elements of the payload, so that
corrupted hops are detected.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from segue.bench.harness.hardware import Machine, machine
from segue.bench.harness.process import python_path
from segue.bench.harness.report import Columns, table_of
from segue.bench.harness.results import VERSION, now, read_values, write_result
from segue.bench.harness.rounds import median_ratio, milliseconds, rotated
from segue.cli.parser import Parser
from segue.connectors.base import Arrived
from segue.connectors.shm.connector import SharedMemoryConnector
from segue.messages.errors import ConfigError

WARM_UP = 10
_PACKET = 1 << 16


def consume(control: socket.socket) -> None:
    """The consumer's process: take each payload, report its arrival time and checksum, release it."""
    torch.set_num_threads(1)
    connector = SharedMemoryConnector(f"hop-consumer-{os.getpid()}", pool_bytes=1 << 20)
    while packet := control.recv(_PACKET):
        found = connector.fetch("a", "b", "hop", msgspec.msgpack.decode(packet), lambda: None)
        now = time.perf_counter_ns()
        assert isinstance(found, Arrived), "the payload was lost"
        probe = int(found.payload["x"][:: 1 << 18].sum())
        del found
        connector.release("hop")
        control.send(msgspec.msgpack.encode((now, probe)))
    connector.close()


class Hop:
    """The producer's process: each method runs one operation once and returns seconds."""

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
        found[0]["x"].copy_(self.source)  # stands for the computation; not timed
        written = time.perf_counter_ns()
        return {"in place": (self._arrival(found[2]) - written + reserved - start) / 1e9}

    def _arrival(self, metadata: dict[str, Any] | None) -> int:
        self.control.send(msgspec.msgpack.encode(metadata))
        arrived, probe = msgspec.msgpack.decode(self.control.recv(_PACKET))
        assert probe == self.expected, "the payload arrived changed"
        return arrived


def measure(size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round after the warm-up, by operation. `size` in bytes."""
    torch.set_num_threads(1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    consumer = subprocess.Popen(
        [sys.executable, "-m", "segue.bench.hop", "--consume", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    theirs.close()
    connector = SharedMemoryConnector(f"hop-producer-{os.getpid()}", pool_bytes=max(64 << 20, 2 * size))
    try:
        hop = Hop(size, connector, ours)
        return rotated([hop.memcpy, hop.hop, hop.in_place], WARM_UP, rounds)
    finally:
        ours.close()
        consumer.wait()
        connector.close()


class HopRow(msgspec.Struct):
    """The figures of one operation."""

    median_ms: float
    p90_ms: float
    copies: float
    """Median over rounds of its time divided by that round's memcpy."""


class HopResult(msgspec.Struct, kw_only=True):
    version: int = VERSION
    benchmark: str = "hop"
    finished: str
    """ISO 8601, UTC."""
    machine: Machine
    bytes: int
    rounds: int
    threads: int = 1
    rows: dict[str, HopRow]


def report(size: int, seconds: dict[str, list[float]], found: Machine) -> HopResult:
    """The result from the seconds of each round."""
    copies = seconds["memcpy"]
    rows = {name: HopRow(*milliseconds(one), median_ratio(one, copies)) for name, one in seconds.items()}
    return HopResult(finished=now(), machine=found, bytes=size, rounds=len(copies), rows=rows)


def hop_table(result: HopResult) -> str:
    """The machine, and a Markdown table."""
    machine = result.machine
    columns: Columns[tuple[str, HopRow]] = {
        f"{result.bytes / 2**20:g} MiB, one thread a side": lambda row: row[0],
        "median, ms": lambda row: f"{row[1].median_ms:.2f}",
        "p90, ms": lambda row: f"{row[1].p90_ms:.2f}",
        "of one memcpy": lambda row: f"{row[1].copies:.2f}×",
    }
    where = f"{machine.cores} cores of {machine.cpu}; {result.finished[:10]}, commit {machine.commit}; "
    return f"{where}{result.rounds} rounds, interleaved.\n\n{table_of(result.rows.items(), columns)}"


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
    if options.json is not None and options.json.exists():
        try:
            read_values(options.json)
        except ConfigError as error:
            parser.error(f"--json would replace a file that is no result: {error.message}; name another")
    size = int(options.mib * 2**20) // 8 * 8
    found = machine()
    result = report(size, measure(size, options.rounds), found)
    print(hop_table(result))
    if options.json is not None:
        write_result(result, options.json)


if __name__ == "__main__":
    main()
