"""What a benchmark ran on: figures mean nothing without it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from segue.graph.hardware import detect_hardware

PACKAGES = ("segue", "torch", "transformers", "numpy", "msgspec", "pyzmq")


class Machine(msgspec.Struct):
    """The machine at the start of a run."""

    cpu: str
    cores: int
    """That this process may use."""
    memory_bytes: int
    gpus: list[str]
    system: str
    python: str
    packages: dict[str, str]
    load_average: tuple[float, float, float]
    """Before anything was started: above about 0.5, somebody else was working too."""


def machine() -> Machine:
    found = detect_hardware()
    return Machine(
        cpu=_cpu_model(),
        cores=found.cpus,
        memory_bytes=found.memory_bytes,
        gpus=_gpus(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        load_average=os.getloadavg(),
    )


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return [] if answer.returncode else answer.stdout.strip().splitlines()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
