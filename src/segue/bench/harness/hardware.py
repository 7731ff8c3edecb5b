"""Describe the machine of a benchmark, and measure a device's ceilings: bytes per second of a copy, operations per
second of a matmul."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from segue.graph.deployment.deployment import Hardware
from segue.graph.machine.hardware import detect_hardware

REPEATS = 10


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


PACKAGES = ("segue", "torch", "transformers", "numpy", "msgspec", "pyzmq")


class Machine(msgspec.Struct):
    """The machine at the start of a run."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int
    gpus: list[str]
    system: str
    python: str
    packages: dict[str, str]
    load_average: tuple[float, float, float]
    """Before the sides start: above about 0.5, another program was running too."""
    commit: str = ""
    """Commit of the source; `-dirty` if tracked files were changed; empty outside a checkout and in older files."""


def machine(found: Hardware | None = None) -> Machine:
    """`found`: the hardware, if it was detected before."""
    found = found or detect_hardware()
    return Machine(
        cpu=_cpu_model(),
        cores=found.cpus,
        memory_bytes=found.memory_bytes,
        gpus=[f"{name}, {size >> 20} MiB" for name, size in zip(found.gpu_names, found.gpus, strict=True)],
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        load_average=os.getloadavg(),
        commit=_commit(),
    )


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
