"""Describe the machine of a benchmark."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from segue.graph.deployment.deployment import Hardware
from segue.graph.machine.hardware import detect_hardware

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
