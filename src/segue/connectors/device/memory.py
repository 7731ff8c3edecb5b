"""The interface of the shared-memory connector to an accelerator: device memory that another process can open.

The interface is small: `cuda` implements it for a CUDA device, `memfd` with host memory, for machines without one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from segue.connectors.intervals import Intervals
from segue.connectors.payload import APART_ALIGN


class Exported(Protocol):
    """A block of this process's device memory; any process with the handle can open it until it is closed."""

    @property
    def handle(self) -> bytes: ...

    def write(self, offset: int, tensor: Tensor) -> None:
        """Copy a tensor of the device to `offset`, in the order of its stream; `settle` waits for it."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Copy to the host; complete on return. Any thread may call it."""

    def close(self) -> None:
        """Free the memory."""


class Imported(Protocol):
    """Another process's `Exported`, opened in this one."""

    def read(self, offset: int, size: int) -> Tensor | None:
        """Return a copy, [size] uint8 on this process's device, complete on return. None: its device is full."""

    def close(self) -> None: ...


class DeviceMemory(Protocol):
    """One process's view of its device."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is on this device."""

    def export(self, size: int) -> Exported | None:
        """Allocate memory that others can open; None if there is not enough, or the device cannot share."""

    def open(self, handle: bytes) -> Imported | None:
        """Open memory that another process has exported; None if this process cannot reach it."""

    def settle(self) -> None:
        """Return when all writes are visible to every process."""


@dataclass(frozen=True, slots=True)
class Region:
    """A block of the device pool, from `take` until `give`."""

    pool: DevicePool
    memory: Exported
    edge: tuple[str, str]
    """The two stages whose payload it holds."""
    unit: int
    units: int
    size: int

    @property
    def offset(self) -> int:
        """Bytes from the start of the exported memory."""
        return self.unit * APART_ALIGN

    def give(self) -> None:
        self.pool.give(self)


class DevicePool:
    """One exported block of `size` bytes, allocated on first use and kept until `close`; allocates first-fit within it.

    Tensors are copied into this memory of the connector for three reasons. A process opens a handle in milliseconds,
    but a copy within the device takes microseconds: one handle per producer is opened once. A producer may overwrite a
    tensor that it has put (a CUDA graph has the same output tensors at each replay). And memory of torch's allocator
    cannot be shared safely: it may have no handle (expandable segments), may go back to the driver while it is being
    read, and is shared by reference counts in files that a killed process leaves in /dev/shm.

    Thread-safe.
    """

    def __init__(self, memory: DeviceMemory, size: int) -> None:
        self._memory = memory
        self._intervals = Intervals(size // APART_ALIGN)
        self._lock = threading.Lock()
        self._exported: Exported | None = None
        self._refused = False

    def take(self, edge: tuple[str, str], size: int) -> Region | None:
        """Allocate `size` bytes; None if there is no space now, or the device cannot share memory."""
        units = -(-size // APART_ALIGN)
        with self._lock:
            if self._exported is None and not self._refused:
                self._exported = self._memory.export(self._intervals.length * APART_ALIGN)
                self._refused = self._exported is None
            if self._exported is None or (unit := self._intervals.take(units)) is None:
                return None
            return Region(self, self._exported, edge, unit, units, size)

    def give(self, region: Region) -> None:
        with self._lock:
            self._intervals.give(region.unit, region.units)

    @property
    def bytes_in_use(self) -> int:
        with self._lock:
            return (self._intervals.length - sum(end - start for start, end in self._intervals.free)) * APART_ALIGN

    def close(self) -> None:
        with self._lock:
            if self._exported is not None:
                self._exported.close()
            self._exported, self._refused = None, True
