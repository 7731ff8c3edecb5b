"""Shared weights on a CPU: they lie in the memfd of the store, after its index.

Mappings are private: a worker that wrote to a weight would get its own copy of that page.

Optional reading: `shared_weights` chooses it on a CPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right

import torch

from segue.worker.process.weights_store import WeightsStore

_HUGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_MAP_FIXED = 0x10


class HostWeights:
    """`segue.worker.process.shared_weights.Memory` of the host."""

    align = mmap.PAGESIZE

    def __init__(self, store: WeightsStore) -> None:
        self._store = store
        self._files = _file_mappings()
        self._base = self._nbytes = 0

    def owns(self, tensor: torch.Tensor) -> bool:
        """Not what is mapped from a file: processes share that already."""
        return tensor.device.type == "cpu" and not _within(self._files, tensor.data_ptr())

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return host_bytes(address, nbytes)

    def create(self, nbytes: int) -> int:
        # now, and not by a fault that would kill the worker
        os.posix_fallocate(self._store.memfd, 0, self._first + nbytes)
        self._base, self._nbytes = self._mapped(nbytes), nbytes
        return self._base

    def write(self, data: torch.Tensor, place: int) -> None:
        view, place = data.numpy().data, self._first + place
        while view:
            written = os.pwrite(self._store.memfd, view, place)
            view, place = view[written:], place + written

    def keep(self) -> None:
        libc().madvise(self._base, self._nbytes, _MADV_COLLAPSE)
        self._store.seal()

    def open(self) -> tuple[int, int]:
        nbytes = os.fstat(self._store.memfd).st_size - self._first
        return self._mapped(nbytes), nbytes

    @property
    def _first(self) -> int:
        """Offset of the weights in the memfd."""
        return -(-self._store.index_end // _HUGE) * _HUGE

    def _mapped(self, nbytes: int) -> int:
        """Map the weights for the life of the process, aligned to huge pages; return their address."""
        calls = libc()
        room = calls.mmap(None, nbytes + _HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        aligned = -(-room // _HUGE) * _HUGE if room != _FAILED else 0
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        if not aligned or calls.mmap(aligned, nbytes, access, flags, self._store.memfd, self._first) != aligned:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot map {nbytes} bytes of weights: {os.strerror(number)}")
        calls.madvise(aligned, nbytes, _MADV_HUGEPAGE)  # where the system has huge pages of memfds only on request
        return aligned


def host_bytes(address: int, nbytes: int) -> torch.Tensor:
    """Return [nbytes] uint8 over the memory at an address, without owning it."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _file_mappings() -> list[tuple[int, int]]:
    """Return the address ranges of this process that map files, in order."""
    found = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, _, _, _, inode, *_ = line.split()
            if inode != "0":
                start, _, end = span.partition("-")
                found.append((int(start, 16), int(end, 16)))
    return found


def _within(ranges: list[tuple[int, int]], address: int) -> bool:
    place = bisect_right(ranges, (address, 1 << 64)) - 1
    return place >= 0 and address < ranges[place][1]


_FAILED = ctypes.c_void_p(-1).value


def libc() -> ctypes.CDLL:
    """Return the C library: Python's `mmap` cannot align."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
