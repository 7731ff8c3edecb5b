"""Sides loaded in turn, on a device that holds the weights of one: what fails is noted, and the rest is measured."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
import torch

from segue.bench.load_results import GrowingResult


class DeviceResult(GrowingResult, kw_only=True):
    """What every such benchmark notes of its sides."""

    startup: dict[str, float] = msgspec.field(default_factory=dict)
    """Side → seconds until it was loaded."""
    peak_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    failures: dict[str, str] = msgspec.field(default_factory=dict)
    """Level → what was raised in it."""


S = TypeVar("S")


@dataclass
class OneLoaded(Generic[S]):
    """A run under way."""

    result: DeviceResult
    device: torch.device
    seconds: float
    """No level begins after so long."""
    say: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    _loaded: dict[str, S] = field(default_factory=dict)
    """At most one."""

    def level(self, name: str, what: str, make: Callable[[], S], measured: Callable[[S], str]) -> None:
        """Measure the side `name`, which `make` loads; `measured` says in a line what it found. After `seconds` there
        is nothing but a note."""
        if time.monotonic() - self.began > self.seconds:
            self.result.failures[what] = f"not begun: {self.seconds:g} s were over"
            return
        try:
            self.say(f"{what}: {measured(self._side(name, make))}")
        except Exception as error:  # whatever it is, it is a finding about this level, and kept as one
            self.result.failures[what] = traceback.format_exc()
            self.say(f"{what}: {type(error).__name__}: {error}")
        if self.device.type == "cuda":
            self.result.peak_bytes[name] = torch.cuda.max_memory_allocated(self.device)

    def _side(self, name: str, make: Callable[[], S]) -> S:
        """The side, loaded; any other is let go before."""
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
    """For people. A GPU becomes the current one."""
    if device.type != "cuda":
        return "cpu"
    torch.cuda.set_device(device)
    return torch.cuda.get_device_name(device)


def failure_lines(result: DeviceResult) -> list[str]:
    """A line for each level that failed."""
    return [f"{level}: `{said.strip().splitlines()[-1]}`" for level, said in result.failures.items()]
