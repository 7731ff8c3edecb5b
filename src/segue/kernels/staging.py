"""Copies between host and device without waiting for the device: one copy each way, through pinned memory.

A plain copy from or to pageable memory waits until the device has completed all work dispatched before it, so a step
with a few of them runs in lockstep with the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNED = 16


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy `array` to `device`, in stream order; on a CPU the result may share its memory."""
    there = torch.from_numpy(array)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.to(device)


def upload_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Like `upload`, for several arrays in one copy."""
    places, end = [], 0
    for array in arrays:
        places.append(end)
        end += -(-array.nbytes // _ALIGNED) * _ALIGNED
    packed = np.empty(end, dtype=np.uint8)
    for array, place in zip(arrays, places, strict=True):
        packed[place : place + array.nbytes].view(array.dtype)[:] = array.ravel()
    there = upload(packed, device)
    return [
        there[place : place + array.nbytes].view(_dtype(array)).view(array.shape)
        for array, place in zip(arrays, places, strict=True)
    ]


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


class Readback:
    """Copies tensors to the host: the copy is dispatched at once, and `wait` returns their values."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Any shapes; integers, booleans and floats of at most 64 bits."""
        self._kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        packed = torch.cat([_words(tensor) for tensor in tensors])
        self._landed: torch.cuda.Event | None = None
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._landed = torch.cuda.Event()
            self._landed.record(torch.cuda.current_stream(packed.device))
        else:
            self._host = packed

    def wait(self) -> list[np.ndarray]:
        """Wait for the copy; returns bool, int64 or float64 arrays of the tensors' shapes."""
        if self._landed is not None:
            self._landed.synchronize()
        words = self._host.numpy(force=True)
        found, begin = [], 0
        for shape, dtype in self._kinds:
            part = words[begin : begin + shape.numel()].reshape(shape)
            begin += shape.numel()
            if dtype.is_floating_point:
                part = part.view(np.float64)
            elif dtype == torch.bool:
                part = part.astype(np.bool_)
            found.append(part)
        return found


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Flatten to one int64 per element: floats by the bits of their exact float64 value."""
    if tensor.is_floating_point():
        return tensor.to(torch.float64).reshape(-1).view(torch.int64)
    return tensor.reshape(-1).to(torch.int64)
