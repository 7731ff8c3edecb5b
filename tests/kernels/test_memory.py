"""What loading leaves behind, and how it is told that there is no memory."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys

import pytest
import torch

from segue.kernels.device import out_of_memory

_SCRIPT = """
import os
import torch
from segue.kernels.device import give_back

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


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("could not create a primitive"),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_words_for_no_memory(error: Exception) -> None:
    assert out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("std::bad_alloc"), OSError(errno.ENOENT, "")]
)
def test_other_failures(error: Exception) -> None:
    assert not out_of_memory(error)
