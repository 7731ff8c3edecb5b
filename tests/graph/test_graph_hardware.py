"""The machine as its files describe it; all of them real files, under a root of our own."""

from __future__ import annotations

import os
from pathlib import Path

from segue.graph.machine.hardware import cpu_quota, detect_hardware, memory_limit


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemFree:  10 kB\nMemTotal:       16000 kB\nSwapTotal: 0 kB\n"}


def test_this_machine() -> None:
    hardware = detect_hardware()
    assert 1 <= hardware.cpus <= len(os.sched_getaffinity(0))
    assert hardware.memory_bytes > 1 << 20


def test_cgroup_version_2_and_its_ancestors(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/memory.max": "max\n",
            "sys/fs/cgroup/memory.max": "4096000\n",
        },
    )
    assert cpu_quota(root) == 1.5
    assert memory_limit(root) == 4096000


def test_cgroup_version_1(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "4:memory:/job\n2:cpuacct:/x\n1:cpu,cpuset:/job\n0::/\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert cpu_quota(root) == 3
    assert memory_limit(root) == 16000 * 1024, "version 1 writes a huge number for no limit"


def test_no_cgroups(tmp_path: Path) -> None:
    root = write(tmp_path, MEMINFO)
    assert cpu_quota(root) is None
    assert memory_limit(root) == 16000 * 1024
