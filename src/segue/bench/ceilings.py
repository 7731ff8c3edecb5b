"""What a device can do at most, measured: bytes per second of a copy, operations per second of a product."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch

REPEATS = 10


class Ceilings(msgspec.Struct, kw_only=True):
    """Of one device, in one type."""

    bytes_per_second: float
    """Read and written by a copy within its memory."""
    flops: float
    """Operations per second of a product of square matrices of random numbers."""


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Takes a moment, and a few gigabytes of a GPU."""
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


def best(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Seconds of the quickest of some calls; one before them is not counted."""
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
    """Return when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
