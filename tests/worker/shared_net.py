"""A network whose weights workers share, and a CUDA driver over memfds."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segue.connectors.device.cuda import Driver
from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.linear.linear import PackedLinear
from segue.worker.process.cuda_weights import CudaChunks, CudaWeights
from segue.worker.process.host_weights import host_bytes, libc
from segue.worker.process.weights_store import WeightsStore

WIDE = 256
IDS = torch.arange(WIDE)
WEIGHTS = 4 * 4 * WIDE * WIDE + 2 * WIDE * 2 * WIDE
"""Bytes of a network that are large enough to be shared, but for padding of packed ones."""


class Net(nn.Module):
    """A tied table, a joined weight of which two layers see a part, a half precision buffer, and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDE, WIDE)
        self.head = nn.Linear(WIDE, WIDE, bias=False)
        self.head.weight = self.table.weight
        joined = torch.randn(2 * WIDE, WIDE)
        self.first, self.second = (nn.Linear(WIDE, WIDE) for _ in range(2))
        self.first.weight = nn.Parameter(joined[:WIDE])
        self.second.weight = nn.Parameter(joined[WIDE:])
        self.register_buffer("scale", torch.randn(WIDE, 2 * WIDE).half().t())
        self.packed: nn.Module = nn.Linear(WIDE, WIDE)
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(self.table(ids)))
        return self.head(self.packed(x)) @ self.scale[:WIDE].float()


def net(seed: int = 0, device: str = "cpu") -> Net:
    torch.manual_seed(seed)
    made = Net().eval()
    if device == "cpu" and cpu_kernels() is not None:  # in panels, as a stage's network is
        made.packed = PackedLinear(made.packed, 8)  # type: ignore[arg-type]
    return made.to(device)


def places(network: nn.Module) -> dict[str, str]:
    """Tensor → how its memory is mapped, and of what: `rw-p /memfd:segue-weights`."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(end, 16) for end in line[0].split("-")), f"{line[1]} {''.join(line[5:6])}") for line in lines]
    return {
        name: next(how for start, end, how in spans if start <= tensor.data_ptr() < end)
        for name, tensor in network.state_dict(keep_vars=True).items()
    }


def descriptors() -> int:
    """How many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


class HostCuda:
    """The calls of libcuda for `CudaChunks`, over memfds: a handle is one, an export a duplicate, a mapping a mapping.

    `room`: bytes that can still be allocated. `exports`: whether it gives descriptors. `failing`: a call → its code.
    """

    UNIT = 1 << 14
    BEHIND = 8 << 20
    """Reserved, too: who reads behind what he asked for is killed."""
    NUMBER = 4
    """Of the device, whose index is 0 for torch."""

    def __init__(self, room: int = 1 << 40, *, exports: bool = True) -> None:
        self.room = room
        self.exports = exports
        self.failing: dict[str, int] = {}
        self.made = 0
        """Chunks."""
        self.contexts = 0
        self.handles: set[int] = set()
        self._libc = libc()
        self._libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def __getitem__(self, name: str) -> Callable[..., int]:
        def called(*arguments: Any) -> int:
            if name in self.failing:
                return self.failing[name]
            assert self.contexts == 1 or not name.startswith("cuMem"), f"{name} needs a context"
            return getattr(self, name)(*arguments) or 0

        return called

    def cuInit(self, flags: ctypes.c_uint) -> None: ...

    def cuDeviceGet(self, out: Any, ordinal: ctypes.c_int) -> None:
        out._obj.value = ordinal.value + self.NUMBER

    def cuDevicePrimaryCtxRetain(self, out: Any, device: ctypes.c_int) -> None: ...

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> None:
        self.contexts += 1

    def cuCtxPopCurrent_v2(self, out: Any) -> None:
        self.contexts -= 1

    def cuGetErrorString(self, code: ctypes.c_int, out: Any) -> None:
        out._obj.value = {2: b"out of memory", 801: b"operation not supported"}[code.value]

    def cuDeviceGetAttribute(self, out: Any, attribute: ctypes.c_int, device: ctypes.c_int) -> None:
        assert (attribute.value, device.value) == (103, self.NUMBER)
        out._obj.value = int(self.exports)

    def cuMemGetAllocationGranularity(self, out: Any, properties: Any, option: ctypes.c_uint64) -> None:
        self.check(properties)
        assert option.value == 0
        out._obj.value = self.UNIT

    def cuMemAddressReserve(self, out: Any, size: ctypes.c_uint64, *zeros: ctypes.c_uint64) -> None:
        assert [zero.value for zero in zeros] == [0, 0, 0]
        size.value += self.BEHIND
        out._obj.value = self.mapped(None, size.value, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def cuMemCreate(self, out: Any, size: ctypes.c_uint64, properties: Any, flags: ctypes.c_uint64) -> int:
        self.check(properties)
        assert size.value
        assert size.value % self.UNIT == flags.value == 0
        if size.value > self.room:
            return 2
        self.room -= size.value
        self.made += 1
        out._obj.value = os.memfd_create("chunk")
        os.ftruncate(out._obj.value, size.value)
        self.handles.add(out._obj.value)
        return 0

    def cuMemExportToShareableHandle(self, out: Any, handle: ctypes.c_uint64, kind: Any, flags: Any) -> None:
        assert (kind.value, flags.value) == (1, 0)
        out._obj.value = os.dup(handle.value)

    def cuMemImportFromShareableHandle(self, out: Any, descriptor: ctypes.c_uint64, kind: ctypes.c_uint64) -> None:
        assert kind.value == 1
        out._obj.value = os.dup(descriptor.value)
        self.handles.add(out._obj.value)

    def cuMemMap(
        self, address: ctypes.c_uint64, size: ctypes.c_uint64, offset: Any, handle: ctypes.c_uint64, flags: Any
    ) -> None:
        assert offset.value == flags.value == 0
        assert os.fstat(handle.value).st_size == size.value
        self.mapped(address.value, size.value, mmap.MAP_SHARED | 0x10, handle.value)  # MAP_FIXED

    def cuMemSetAccess(self, address: ctypes.c_uint64, size: ctypes.c_uint64, access: Any, count: Any) -> None:
        found = access._obj
        assert (found.place.type, found.place.id, count.value) == (1, self.NUMBER, 1)
        allowed = {1: mmap.PROT_READ, 3: mmap.PROT_READ | mmap.PROT_WRITE}[found.flags]
        assert self._libc.mprotect(address.value, size.value, allowed) == 0

    def cuMemRelease(self, handle: ctypes.c_uint64) -> None:
        self.handles.remove(handle.value)
        os.close(handle.value)

    def check(self, properties: Any) -> None:
        found = properties.contents
        assert (found.type, found.handles, found.place.type, found.place.id) == (1, 1, 1, self.NUMBER)
        assert list(found.rest) == [0, 0]
        assert ctypes.sizeof(found) == 32

    def mapped(self, address: int | None, size: int, flags: int, handle: int) -> int:
        found = self._libc.mmap(address, size, 0, flags, handle, 0)
        assert found != ctypes.c_void_p(-1).value
        return int(found)


class OnHost(CudaWeights):
    """Weights on a CUDA device whose memory the host's tensors are in."""

    def __init__(self, store: WeightsStore, cuda: HostCuda, chunk_bytes: int = 1 << 18) -> None:
        driver = Driver(cuda, torch.device("cuda:0"))  # type: ignore[arg-type]
        super().__init__(store, CudaChunks(driver), torch.device("cpu"), chunk_bytes)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return host_bytes(address, nbytes)

    def settle(self) -> None:
        """Copies are complete when they return."""
