"""Which errors of a CUDA device end a process, by the words that its libraries use."""

from __future__ import annotations

import pytest
import torch

from segue.engines.diffusion.sharing import Status
from segue.engines.entries import as_error
from segue.kernels.device import DeviceLost, device_lost, out_of_memory
from segue.messages.errors import StageFailed


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("cuFFT error: CUFFT_EXEC_FAILED"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error"),
    ],
)
def test_the_device_takes_no_more_calls(error: Exception) -> None:
    assert device_lost(error)
    for answer in (as_error, Status.of):
        with pytest.raises(DeviceLost, match="the device reported") as caught:
            answer(error)
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_memory_that_is_over_is_the_failure_of_a_request(error: Exception) -> None:
    assert out_of_memory(error)
    assert "no memory left" in as_error(error).message


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("CUDA error: said by something else"),
    ],
)
def test_what_concerns_one_call_is_the_failure_of_a_request(error: Exception) -> None:
    assert not device_lost(error)
    assert isinstance(as_error(error), StageFailed)
