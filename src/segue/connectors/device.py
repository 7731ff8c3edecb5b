"""The seam between the shared-memory connector and an accelerator: device memory that another process can open.

What the connector asks is little, so that it can be had of anything: `segue.connectors.cuda` has it of a CUDA device,
`segue.connectors.memfd_device` of host memory, for machines without one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from segue.connectors.intervals import Intervals
from segue.connectors.payload import APART_ALIGN


class Exported(Protocol):
    """A run of device memory of this process; whoever has the handle can open it while it is not closed."""

    @property
    def handle(self) -> bytes: ...

    def write(self, offset: int, tensor: Tensor) -> None:
        """Copy a tensor that the device owns to `offset`, in the order of its stream; `settle` waits for it."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Copy to the host; complete on return. From any thread."""

    def close(self) -> None:
        """Give the memory back."""


class Imported(Protocol):
    """Another process's `Exported`, opened in this one."""

    def read(self, offset: int, size: int) -> Tensor | None:
        """[size] uint8 in this process's own memory, on its device: a copy, complete on return. None: no room there."""

    def close(self) -> None: ...


class DeviceMemory(Protocol):
    """One process's view of its device."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor's bytes lie on this device."""

    def export(self, size: int) -> Exported | None:
        """Memory that others can open; None where there is not that much, or the device cannot share."""

    def open(self, handle: bytes) -> Imported | None:
        """What another process has exported; None where this one cannot reach it."""

    def settle(self) -> None:
        """Return when all that was written is there for every process to see."""


@dataclass(frozen=True, slots=True)
class Region:
    """A run of the device pool: from `take` until `give`."""

    pool: DevicePool
    memory: Exported
    edge: tuple[str, str]
    """The stages it is taken for."""
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
    """One exported run of `size` bytes, had when it is first needed and kept until `close`; first fit within it.

    It is the connector's own memory, and tensors are copied into it, for three reasons. A process opens a handle in
    milliseconds and a copy within the device takes microseconds: one handle per producer is opened once. A producer may
    write over a tensor it has put (the outputs of a CUDA graph are the same at each replay). And memory of torch's
    allocator cannot be lent safely: it may be of a kind that has no handle (expandable segments), be given back to the
    driver under the reader, and is lent with reference counts in files that a killed process leaves in /dev/shm.

    Thread-safe.
    """

    def __init__(self, memory: DeviceMemory, size: int) -> None:
        self._memory = memory
        self._intervals = Intervals(size // APART_ALIGN)
        self._lock = threading.Lock()
        self._exported: Exported | None = None
        self._refused = False

    def take(self, edge: tuple[str, str], size: int) -> Region | None:
        """Room for `size` bytes; None where there is none now, or the device has none to share."""
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
