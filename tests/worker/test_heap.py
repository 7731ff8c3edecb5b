"""What loading leaves behind."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_SCRIPT = """
import os
import torch
from segue.worker.heap import give_back

def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

kept = []
for _ in range(60):  # what is freed lies between what is kept
    large = torch.ones(1 << 20)
    kept.append(torch.ones(1 << 10))
    del large
many = [(torch.ones(1 << 20), torch.ones(1 << 10)) for _ in range(60)]
kept += [small for _, small in many]
del many
before = resident()
give_back()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep nothing")
def test_freed_memory_goes_back_to_the_system():
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(64 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) > 150, "MiB of the 240 that were freed"
