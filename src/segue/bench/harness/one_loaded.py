"""Load sides one at a time on a device that holds the weights of one; record failures and continue."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
import torch

from segue.bench.harness.load_results import GrowingResult


class DeviceResult(GrowingResult, kw_only=True):
    """The common part of such benchmarks' results."""

    startup: dict[str, float] = msgspec.field(default_factory=dict)
    """Side → seconds until it was loaded."""
    peak_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    failures: dict[str, str] = msgspec.field(default_factory=dict)
    """Level → its exception."""


S = TypeVar("S")


@dataclass
class OneLoaded(Generic[S]):
    """The state of a run."""

    result: DeviceResult
    device: torch.device
    seconds: float
    """No level starts after this time."""
    say: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    _loaded: dict[str, S] = field(default_factory=dict)
    """At most one entry."""

    def level(self, name: str, what: str, make: Callable[[], S], measured: Callable[[S], str]) -> None:
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

    def _side(self, name: str, make: Callable[[], S]) -> S:
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


def failure_lines(result: DeviceResult) -> list[str]:
    """One line for each level that failed."""
    return [f"{level}: `{said.strip().splitlines()[-1]}`" for level, said in result.failures.items()]
