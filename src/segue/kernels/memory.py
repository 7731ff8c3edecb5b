"""Memory that is over, and memory that loading and large calls leave behind."""

from __future__ import annotations

import ctypes
import errno
import gc
import sys

import torch

_WORDS = ("can't allocate memory", "std::bad_alloc", "could not create a primitive", "could not create a memory")
"""Of PyTorch's allocator on a CPU, of C++, and of oneDNN, which asks for memory of its own."""


def out_of_memory(error: BaseException) -> bool:
    """Whether a call failed for lack of memory: CUDA has a class for it, on a CPU there are only words."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
    )


def give_back() -> None:
    """Free pages of the heap go back to the system, where the C library is one that keeps them (glibc).

    Weights are read, widened, fused and laid out one after the other; what they were in between stays with the process
    otherwise: 3.7 GB instead of 1.2 for 387M parameters (`MALLOC_TRIM_THRESHOLD_` of `orchestrator.placement`).
    """
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def give_back_on(device: torch.device) -> None:
    """As `give_back`, and what the allocator of a CUDA device keeps."""
    give_back()
    if device.type == "cuda":
        torch.cuda.empty_cache()
