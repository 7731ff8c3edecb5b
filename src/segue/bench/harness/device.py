"""Networks in this process, on one device: its ceilings (bytes per second of a copy, operations per second of a
matmul), and sides that are loaded one at a time, since it holds the weights of one. Failures are recorded.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import msgspec
import torch

from segue.bench.harness.results import Growing

SideT = TypeVar("SideT")
REPEATS = 10
_SQUARE = 2048
"""Rows and columns of a large matmul on a CPU."""


class Ceilings(msgspec.Struct, kw_only=True):
    """The ceilings of one device in one dtype."""

    bytes_per_second: float
    """Bytes read and written by a copy within its memory."""
    flops: float
    """Operations per second of a matmul of random square matrices."""


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure the ceilings; takes a moment, and a few gigabytes of a GPU."""
    large = device.type == "cuda"
    source = torch.ones(1 << (32 if large else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = best(partial(target.copy_, source), device)
    del source, target
    side = 8192 if large else 512
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    multiplied = best(lambda: torch.mm(a, b), device)
    size = 1 << (32 if large else 26)
    return Ceilings(bytes_per_second=2 * size / copied, flops=2 * side**3 / multiplied)


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of large matmuls. On a CPU: the best of both of torch's libraries; which one is faster
    depends on it (on an EPYC of Zen 5, oneDNN takes 0.4 of the time)."""
    if device.type != "cpu":
        return ceilings(device, dtype).flops
    a, b = (torch.randn(_SQUARE, _SQUARE, dtype=dtype) for _ in range(2))
    ways: list[Callable[[], object]] = [lambda: torch.mm(a, b)]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(b, _SQUARE)
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], None))
    return 2 * _SQUARE**3 / min(best(way, device, 5) for way in ways)


def best(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Seconds of the fastest of some calls, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        settle(device)
        began = time.perf_counter()
        run()
        settle(device)
        times.append(time.perf_counter() - began)
    return min(times)


def settle(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DeviceResult(Growing, kw_only=True):
    """The common part of such benchmarks' results."""

    startup: dict[str, float] = msgspec.field(default_factory=dict)
    """Side → seconds until it was loaded."""
    peak_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    failures: dict[str, str] = msgspec.field(default_factory=dict)
    """Level → its exception."""


@dataclass
class OneLoaded(Generic[SideT]):
    """The state of a run."""

    result: DeviceResult
    device: torch.device
    seconds: float
    """No level starts after this time."""
    say: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    _loaded: dict[str, SideT] = field(default_factory=dict)
    """At most one entry."""

    def level(self, name: str, what: str, make: Callable[[], SideT], measured: Callable[[SideT], str]) -> None:
        """Measure the side `name`, loaded by `make`; `measured` returns a summary line. After `seconds`, only record
        that the level was skipped."""
        if time.monotonic() - self.began > self.seconds:
            self.result.failures[what] = f"not begun: {self.seconds:g} s were over"
            return
        try:
            self.say(f"{what}: {measured(self._side(name, make))}")
        except Exception as error:  # any exception is a finding about this level, and is recorded as one
            self.result.failures[what] = traceback.format_exc()
            self.say(f"{what}: {type(error).__name__}: {error}")
        if self.device.type == "cuda":
            self.result.peak_bytes[name] = torch.cuda.max_memory_allocated(self.device)

    def _side(self, name: str, make: Callable[[], SideT]) -> SideT:
        """The loaded side; any other side is released first."""
        if name not in self._loaded:
            self._loaded.clear()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)
            began = time.monotonic()
            self._loaded[name] = make()
            self.result.startup[name] = time.monotonic() - began
            self.say(f"{name} is there after {self.result.startup[name]:.1f} s")
        return self._loaded[name]


def name_of(device: torch.device) -> str:
    """The device's name for reports. Makes a GPU the current one."""
    if device.type != "cuda":
        return "cpu"
    torch.cuda.set_device(device)
    return torch.cuda.get_device_name(device)


def device_page(result: DeviceResult, title: str, conditions: str, *tables: str) -> str:
    """A report: title, conditions, what is missing, tables, and a line for each level that failed."""
    failures = [f"{level}: `{said.strip().splitlines()[-1]}`" for level, said in result.failures.items()]
    title = f"## {title}, {result.finished[:10]}, commit {result.machine.commit}"
    return "\n\n".join([title, conditions, *result.unfinished, *tables, *failures])
