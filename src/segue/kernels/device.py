"""Detects out-of-memory errors and lost CUDA devices, and frees memory that loading and large calls leave behind.

Some errors of a CUDA device make it unusable for the process. CUDA Runtime API, `cudaErrorIllegalAddress` and similar:
"This leaves the process in an inconsistent state and any further CUDA work will return the same error. To continue
using CUDA, the process must be terminated and relaunched." PyTorch, cuBLAS, cuDNN, NCCL and Triton each report such an
error in their own words, often in a later call than the one that failed. So every device error counts as one, except
those that are known to concern one call alone."""

from __future__ import annotations

import ctypes
import errno
import gc
import sys

import torch

_WORDS = (
    *("can't allocate memory", "std::bad_alloc", "could not create a primitive", "could not create a memory"),
    *("CUDA error: out of memory", "Triton Error [CUDA]: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
"""Messages of PyTorch's CPU allocator, of C++, of oneDNN (which allocates its own memory), and of libraries that
allocate CUDA memory without PyTorch's allocator."""


def out_of_memory(error: BaseException) -> bool:
    """Whether a call ran out of memory: PyTorch's CUDA allocator has a class for it, others only have messages."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
    )


def give_back() -> None:
    """Return free heap pages to the system, if the C library keeps them (glibc).

    Weights are read, dequantised, fused and laid out in turn; without this the process keeps the memory of intermediate
    copies: 3.7 GB instead of 1.2 for 387M parameters (`MALLOC_TRIM_THRESHOLD_` of `orchestrator.placement`).
    """
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def give_back_on(device: torch.device) -> None:
    """Like `give_back`, and also empties the cache of a CUDA device's allocator."""
    give_back()
    if device.type == "cuda":
        torch.cuda.empty_cache()


_SAID_BY = (
    *("CUDA error", "CUDA driver error", "cuDNN error", "cuBLAS error", "cuFFT error", "NCCL error"),
    "Triton Error [CUDA]",
)
_OF_ONE_CALL = (
    "invalid argument",
    "invalid configuration argument",
    "invalid device function",
    "no kernel image is available",
    "too many resources requested for launch",
    "operation not supported",
    "stream is capturing",
    "CUBLAS_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_INVALID_VALUE",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_BAD_PARAM",
)
"""The device refuses one call, but accepts the next."""


class DeviceLost(SystemExit):
    """The device is unusable for this process, which must end, so that the worker is restarted.

    Not an `Exception`, because no request failed: requests continue in the new worker.
    """


def device_lost(error: BaseException) -> bool:
    """Whether after this error a CUDA device takes no more calls of this process."""
    if not isinstance(error, RuntimeError) or out_of_memory(error):
        return False
    text = str(error)
    reported = isinstance(error, torch.AcceleratorError) or any(words in text for words in _SAID_BY)
    return reported and not any(words in text for words in _OF_ONE_CALL)


def end_where_lost(error: BaseException) -> None:
    """Raise `DeviceLost` if the process must end because of the error; return for any other."""
    if device_lost(error):
        first = str(error).partition("\n")[0]
        raise DeviceLost(
            f"the device reported {type(error).__name__}: {first}; it takes no more calls of this process"
        ) from error
