"""Share memory of a CUDA device between processes by the driver's IPC calls (libcuda, through ctypes).

CUDA Driver API, "Memory Management": `cuIpcGetMemHandle` names an allocation, `cuIpcOpenMemHandle` maps it in another
process, which may work on another device of the machine if peer access is possible. Copies run on torch's current
stream, and the host waits for them on both sides: announced data are written, released data are read, and no event has
to outlive the process that made it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from segue.connectors.payload import as_carrier

GRANULE = 2 << 20
"""Allocation unit in bytes. A handle covers the whole block from which the driver cut an allocation; a block of whole
granules holds nothing else."""
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


class CudaError(RuntimeError):
    """A driver call failed that must succeed. The message is worded like PyTorch's, so that
    `segue.kernels.device.device_lost` recognizes the errors after which the process must end."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class Driver:
    """Calls libcuda in the primary context of one device, which is torch's context."""

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self._library = library
        number = ctypes.c_int()
        self.device = device
        self._context = ctypes.c_void_p()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device.index))
        # kept for the life of the process, as in torch
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        self.number = number.value
        """The driver's number of the device."""

    def status(self, name: str, *arguments: object) -> int:
        """Make a call and return its result code."""
        return int(self._library[name](*arguments))

    def call(self, name: str, *arguments: object) -> None:
        """Make a call that must succeed; raise `CudaError` if it does not."""
        status = self.status(name, *arguments)
        if status:
            text = ctypes.c_char_p()
            self._library["cuGetErrorString"](ctypes.c_int(status), ctypes.byref(text))
            raise CudaError(f"CUDA error: {(text.value or b'unknown error').decode()} ({name} returned {status})")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current for this thread's calls."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy on torch's current stream of the device."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with self.current():
            self.call(
                "cuMemcpyAsync",
                ctypes.c_uint64(target),
                ctypes.c_uint64(source),
                ctypes.c_size_t(size),
                ctypes.c_void_p(stream),
            )

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


class _Exported:
    """Device memory that this process has allocated."""

    def __init__(self, driver: Driver, address: int, handle: bytes) -> None:
        self._driver = driver
        self._address = address
        self.handle = handle

    def write(self, offset: int, tensor: Tensor) -> None:
        # torch frees a copy made by `contiguous` in the order of the same stream
        source = as_carrier(tensor).contiguous()
        self._driver.copy(self._address + offset, source.data_ptr(), source.nbytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        target = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        with self._driver.current():
            self._driver.call(
                "cuMemcpyDtoH_v2", target, ctypes.c_uint64(self._address + offset), ctypes.c_size_t(len(buffer))
            )

    def close(self) -> None:
        with self._driver.current():
            self._driver.call("cuMemFree_v2", ctypes.c_uint64(self._address))


class _Imported:
    """Device memory that another process has allocated, mapped in this one."""

    def __init__(self, driver: Driver, address: int) -> None:
        self._driver = driver
        self._address = address

    def read(self, offset: int, size: int) -> Tensor | None:
        try:
            target = torch.empty(size, dtype=torch.uint8, device=self._driver.device)
        except torch.OutOfMemoryError:
            return None
        self._driver.copy(target.data_ptr(), self._address + offset, size)
        self._driver.settle()
        return target

    def close(self) -> None:
        """Unmap it, ignoring errors of the driver: the process that allocated it may be gone."""
        with self._driver.current():
            self._driver.status("cuIpcCloseMemHandle", ctypes.c_uint64(self._address))


class CudaMemory:
    """`DeviceMemory` (`memory`) of one CUDA device (with an index), as this process sees it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self._driver.device

    def export(self, size: int) -> _Exported | None:
        address, handle = ctypes.c_uint64(), _IpcHandle()
        with self._driver.current():
            room = ctypes.c_size_t(-(-size // GRANULE) * GRANULE)
            if self._driver.status("cuMemAlloc_v2", ctypes.byref(address), room):
                return None
            if self._driver.status("cuIpcGetMemHandle", ctypes.byref(handle), address):
                self._driver.call("cuMemFree_v2", address)
                return None
        return _Exported(self._driver, address.value, bytes(handle))

    def open(self, handle: bytes) -> _Imported | None:
        if len(handle) != _HANDLE_BYTES:
            return None
        address = ctypes.c_uint64()
        with self._driver.current():
            if self._driver.status(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _IpcHandle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_PEER_ACCESS),
            ):
                return None
        return _Imported(self._driver, address.value)

    def settle(self) -> None:
        self._driver.settle()


def cuda_driver(device: torch.device) -> Driver | None:
    """Return the driver of a CUDA device; None if there is no `libcuda.so.1`."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return Driver(library, torch.device("cuda", device.index or 0))


def cuda_memory(device: torch.device) -> CudaMemory | None:
    """Return the memory of a CUDA device; None if there is no `libcuda.so.1`."""
    driver = cuda_driver(device)
    return None if driver is None else CudaMemory(driver)
