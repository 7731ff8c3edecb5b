"""Shared weights on a CUDA device: chunks of its memory, mapped one after another, and kept by file descriptors.

They are made by calls of the CUDA Driver API, "Virtual Memory Management". Unlike memory with an IPC handle, a chunk
outlives the process that made it: it is freed when no process maps it and no descriptor of it is open. The first worker
moves weights into a chunk, and gives the memory where they were back to the driver before it makes the next one; so it
needs one chunk, or the largest region, more than its weights, and not twice their memory.

Filled chunks are read-only: a worker that wrote to a weight would get an error from the device, and no other worker
would read what it wrote.

Optional reading: `shared_weights` chooses it on a GPU.
"""

from __future__ import annotations

import ctypes
import logging
import os
from itertools import accumulate

import torch

from segue.connectors.device.cuda import Driver, cuda_driver
from segue.worker.process.weights_store import MOST_DESCRIPTORS, WeightsStore, close_all

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ, _READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_…
_EXPORTS = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED


class _Location(ctypes.Structure):  # CUmemLocation
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp; `rest`: for Windows, and flags
    _fields_ = (("type", ctypes.c_int), ("handles", ctypes.c_int), ("place", _Location), ("rest", ctypes.c_uint64 * 2))


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("place", _Location), ("flags", ctypes.c_int))


class _Bytes:
    """Memory of a CUDA device in the form that torch reads; torch refuses memory that is declared read-only."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class CudaChunks:
    """The driver's calls for chunks. Addresses and sizes are multiples of `granularity()`; chunks stay mapped for the
    life of the process. Raises `CudaError`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._place = _Location(_DEVICE, driver.number)
        self._properties = ctypes.pointer(_Properties(_PINNED, _DESCRIPTOR, self._place))

    def supported(self) -> bool:
        found = ctypes.c_int()
        number = ctypes.c_int(self._driver.number)
        refused = self._driver.status("cuDeviceGetAttribute", ctypes.byref(found), ctypes.c_int(_EXPORTS), number)
        return not refused and bool(found.value)

    def granularity(self) -> int:
        found = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), self._properties, 0)
        return found.value

    def reserve(self, nbytes: int) -> int:
        """Return the first of so many consecutive addresses."""
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), nbytes, 0, 0, 0)
        return address.value

    def make(self, address: int, nbytes: int) -> int:
        """Allocate a chunk and map it; return a descriptor of it, which the caller closes."""
        handle, descriptor = ctypes.c_uint64(), ctypes.c_int()
        self._call("cuMemCreate", ctypes.byref(handle), nbytes, self._properties, 0)
        try:
            self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _DESCRIPTOR, 0)
            try:
                self._map(address, nbytes, handle, _READ_WRITE)
            except BaseException:
                os.close(descriptor.value)
                raise
        finally:  # the mapping and the descriptor keep the chunk
            self._call("cuMemRelease", handle)
        return descriptor.value

    def open(self, address: int, nbytes: int, descriptor: int) -> None:
        """Map a chunk of any process, read-only."""
        handle = ctypes.c_uint64()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _DESCRIPTOR)
        try:
            self._map(address, nbytes, handle, _READ)
        finally:
            self._call("cuMemRelease", handle)

    def allow(self, address: int, nbytes: int, access: int = _READ) -> None:
        """Set the access of this process to a mapped chunk."""
        self._call("cuMemSetAccess", address, nbytes, ctypes.byref(_Access(self._place, access)), 1)

    def _map(self, address: int, nbytes: int, handle: ctypes.c_uint64, access: int) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)
        self.allow(address, nbytes, access)

    def _call(self, name: str, *arguments: object) -> None:
        """Make a call that must succeed; Python's integers are passed in 64 bits, which narrower parameters allow."""
        with self._driver.current():
            self._driver.call(name, *(ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments))


class CudaWeights:
    """`segue.worker.process.shared_weights.Memory` of a CUDA device."""

    align = 512  # torch's allocator aligns to it

    def __init__(
        self, store: WeightsStore, chunks: CudaChunks, device: torch.device, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._store = store
        self._chunks = chunks
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._unit = self._base = self._reserved = 0
        self._sizes: list[int] = []
        """Of the chunks that this process has made."""
        self._descriptors: list[int] = []

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(_Bytes(address, nbytes))

    def create(self, nbytes: int) -> int:
        self._unit = self._chunks.granularity()
        self._chunk_bytes = self._whole(max(self._chunk_bytes, -(-nbytes // MOST_DESCRIPTORS)))
        self._reserved = self._whole(nbytes)
        self._base = self._chunks.reserve(self._reserved)
        return self._base

    def write(self, data: torch.Tensor, place: int) -> None:
        mapped, end = sum(self._sizes), place + data.numel()
        if end > mapped:
            torch.cuda.empty_cache()
            size = min(max(self._chunk_bytes, self._whole(end - mapped)), self._reserved - mapped)
            self._descriptors.append(self._chunks.make(self._base + mapped, size))
            self._sizes.append(size)
        self.bytes_at(self._base + place, data.numel()).copy_(data)

    def keep(self) -> None:
        try:
            if self._descriptors:
                self.settle()
                for place, size in zip(accumulate(self._sizes, initial=self._base), self._sizes, strict=False):
                    self._chunks.allow(place, size)
                self._store.send(self._sizes, self._descriptors)
                self._store.seal()
        finally:
            close_all(self._descriptors)
            self._descriptors = []

    def open(self) -> tuple[int, int]:
        sizes, descriptors = self._store.peek()
        try:
            base = self._chunks.reserve(sum(sizes))
            for place, size, descriptor in zip(accumulate(sizes, initial=base), sizes, descriptors, strict=False):
                self._chunks.open(place, size, descriptor)
        finally:
            close_all(descriptors)
        return base, sum(sizes)

    def settle(self) -> None:
        """Wait for copies to the chunks."""
        torch.cuda.current_stream(self._device).synchronize()

    def _whole(self, nbytes: int) -> int:
        """Round up to whole units of memory."""
        return -(-nbytes // self._unit) * self._unit


def cuda_weights(store: WeightsStore, device: torch.device) -> CudaWeights | None:
    """Return the memory of shared weights on a CUDA device; None, with a warning, if its driver cannot share it."""
    driver = cuda_driver(device)
    if driver is None or not (chunks := CudaChunks(driver)).supported():
        log.warning("weights are not shared between workers: the driver of %s exports no memory", device)
        return None
    return CudaWeights(store, chunks, driver.device)
