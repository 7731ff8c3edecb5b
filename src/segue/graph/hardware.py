"""What this machine has, without torch: cores and memory as cgroups leave them, GPUs as `nvidia-smi` lists them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from segue.graph.deployment import Hardware, MiB

_WHOLE, _INSTANCE = "GPU-", "MIG-"
"""How the names of a GPU begin, and of an instance of one, of which a process sees the first alone."""
_PATIENCE = 20
"""Seconds; a driver that wakes up from sleep takes a few."""


def detect_hardware() -> Hardware:
    """The machine, as far as this process may use it."""
    root = Path("/")
    cpus = len(os.sched_getaffinity(0))
    return Hardware(
        cpus=max(1, min(cpus, int(cpu_quota(root) or cpus))),
        memory_bytes=memory_limit(root),
        gpus=gpu_memory(os.environ),
    )


def cpu_quota(root: Path) -> float | None:
    """Cores that the cgroups of this process allow, None where they set no bound. `root` is that of the files read."""
    bounds = []
    for directory in _cgroups(root, "cpu"):
        match _read(directory / "cpu.max").split():
            case [quota, period] if quota != "max":
                bounds.append(int(quota) / int(period))
        quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # the quota is -1 where there is none
            bounds.append(int(quota) / int(period))
    return min(bounds, default=None)


def memory_limit(root: Path) -> int:
    """Bytes of memory of the machine, or of the tightest cgroup of this process."""
    total = next(line for line in _read(root / "proc/meminfo").splitlines() if line.startswith("MemTotal:"))
    bounds = [int(total.split()[1]) * 1024]
    for directory in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(directory / name)
            if limit.isdigit():
                bounds.append(int(limit))
    return min(bounds)


def gpu_memory(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Bytes of each GPU in CUDA's order; none where there is no driver. 0: not known here. `CUDA_VISIBLE_DEVICES` is
    obeyed."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return ()
    command = [program, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    if answer.returncode:  # the program is there, a driver is not
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    # "[N/A]" where the GPU has no memory of its own
    memory = {name: int(mib) * MiB if mib.isdigit() else 0 for index, uuid, mib in rows for name in (index, uuid)}
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    wanted = [row[0] for row in rows] if visible is None else [name.strip() for name in visible.split(",")]
    gpus: list[int] = []
    for name in wanted:
        if name.startswith(_INSTANCE):
            return (*gpus, 0)
        found = [size for known, size in memory.items() if known == name or _begins(known, name)]
        if len(found) != 1:  # as CUDA does: what follows an unknown name is not seen either
            break
        gpus += found
    return tuple(gpus)


def _begins(uuid: str, name: str) -> bool:
    """Whether it is a shortened name of the GPU."""
    return len(name) > len(_WHOLE) and name.startswith(_WHOLE) and uuid.startswith(name)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's cgroups and their ancestors, version 2 and the version 1 `controller`."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controller if controllers else mount
        directory = base / path.lstrip("/")
        yield from (directory, *(parent for parent in directory.parents if parent.is_relative_to(base)))


def _read(path: Path) -> str:
    """The text of a small file, empty where it does not exist."""
    return path.read_text().strip() if path.is_file() else ""
