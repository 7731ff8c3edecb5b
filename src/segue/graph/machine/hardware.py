"""Detect this machine's hardware without torch: cores and memory within its cgroups, GPUs by `gpus`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from segue.graph.deployment.deployment import Hardware
from segue.graph.machine.gpus import find_gpus


def detect_hardware() -> Hardware:
    """Return the part of the machine that this process may use."""
    root = Path("/")
    cpus = len(os.sched_getaffinity(0))
    gpus = find_gpus(root, os.environ)
    return Hardware(
        cpus=max(1, min(cpus, int(cpu_quota(root) or cpus))),
        memory_bytes=memory_limit(root),
        gpus=gpus.memory,
        gpu_names=gpus.names,
        gpu_notes=gpus.notes,
    )


def cpu_quota(root: Path) -> float | None:
    """Return the cores that this process's cgroups allow; None: no bound. `root`: root directory of the files read."""
    bounds = []
    for directory in _cgroups(root, "cpu"):
        match _read(directory / "cpu.max").split():
            case [quota, period] if quota != "max":
                bounds.append(int(quota) / int(period))
        quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # a quota of -1 means none
            bounds.append(int(quota) / int(period))
    return min(bounds, default=None)


def memory_limit(root: Path) -> int:
    """Return the bytes of memory of the machine, or of the tightest cgroup of this process."""
    total = next(line for line in _read(root / "proc/meminfo").splitlines() if line.startswith("MemTotal:"))
    bounds = [int(total.split()[1]) * 1024]
    for directory in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(directory / name)
            if limit.isdigit():
                bounds.append(int(limit))
    return min(bounds)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's cgroups and their ancestors: version 2 and the version 1 `controller`."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controller if controllers else mount
        directory = base / path.lstrip("/")
        yield from (directory, *(parent for parent in directory.parents if parent.is_relative_to(base)))


def _read(path: Path) -> str:
    """Return the text of a small file; empty if it does not exist."""
    return path.read_text().strip() if path.is_file() else ""
