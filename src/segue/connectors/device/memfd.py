"""A device whose memory is a memfd and whose tensors are CPU tensors: it stands in for a CUDA device.

On a machine without a GPU, tests can thus exercise the connector's device path across processes, and kill them: which
process may open which memory, when the connector falls back to the host, and when memory is freed.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from segue.connectors.payload import as_carrier


class _Memory:
    """A mapping of one memfd, for either end."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, size)
        self._bytes = memoryview(self._map)
        self.handle = f"{os.getpid()} {fd} {size}".encode()

    def write(self, offset: int, tensor: Tensor) -> None:
        data = as_carrier(tensor).contiguous().reshape(-1).view(torch.uint8)
        torch.frombuffer(self._bytes, dtype=torch.uint8, count=data.numel(), offset=offset).copy_(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._bytes[offset : offset + len(buffer)]

    def read(self, offset: int, size: int) -> Tensor:
        return torch.frombuffer(self._bytes, dtype=torch.uint8, count=size, offset=offset).clone()

    def close(self) -> None:
        os.close(self._fd)  # the mapping ends with its last view


class MemfdMemory:
    """`DeviceMemory` (`memory`) over host memory. `reachable`: whether it can open exported memory (also its own
    process's, unlike CUDA)."""

    def __init__(self, *, reachable: bool = True) -> None:
        self._reachable = reachable

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def export(self, size: int) -> _Memory | None:
        fd = os.memfd_create("segue-device", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            os.close(fd)
            return None
        return _Memory(fd, size)

    def open(self, handle: bytes) -> _Memory | None:
        if not self._reachable:
            return None
        pid, fd, size = map(int, handle.split())
        try:
            return _Memory(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), size)
        except OSError:
            return None

    def settle(self) -> None:
        """Do nothing: a write is complete when it returns."""
