"""Between host and device without waiting for the device: one copy each way, through pinned memory.

A plain copy from or to pageable memory waits until the device has done all that was launched before it, so a step that
makes a few of them runs in lockstep with the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNED = 16


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` on `device`, in the order of what is launched there; on a CPU the two may share their memory."""
    there = torch.from_numpy(array)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.to(device)


def upload_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The same for several, as one copy."""
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
    """Tensors on their way to the host: the copy is launched at once, `wait` gives what they held then."""

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
        """bool, int64 or float64 arrays of the tensors' shapes. Waits until the device has come to the copy."""
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
    """Flat, one int64 for each: floats by their bits, since float64 holds them exactly."""
    if tensor.is_floating_point():
        return tensor.to(torch.float64).reshape(-1).view(torch.int64)
    return tensor.reshape(-1).to(torch.int64)
