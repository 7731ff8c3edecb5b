"""The consumer's side of the shared-memory connector: other workers' pools, and the payloads taken from them."""

from __future__ import annotations

import threading

import msgspec
import torch
from torch import Tensor

from segue.connectors.base import Arrived
from segue.connectors.device.memory import DeviceMemory
from segue.connectors.payload import PayloadError, read_from
from segue.connectors.shm.handover import Line
from segue.connectors.shm.metadata import Inline, OnDevice, Placed
from segue.connectors.shm.segment import Segment, put_word


class _Taken(msgspec.Struct):
    """Payloads that the consumer holds for one request, until its release."""

    inline: set[tuple[bytes, int]] = msgspec.field(default_factory=set)
    slots: dict[tuple[bytes, int], tuple[Segment, int, int]] = msgspec.field(default_factory=dict)
    """(pool id, generation) → segment, page, word."""


class Receiver:
    """Takes payloads from all other workers for one worker. Thread-safe.

    `device`: opens other workers' device memory; None: this worker cannot.
    """

    def __init__(self, device: DeviceMemory | None) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._lines: dict[bytes, Line] = {}
        self._taken: dict[str, _Taken] = {}

    def take(self, found: Inline | Placed, request_id: str) -> Arrived | None:
        """Return the payload; None if it is gone or already taken."""
        with self._lock:
            if isinstance(found, Inline):
                return self._take_inline(found, request_id)
            return self._take_placed(found, request_id)

    def give_back(self, request_id: str, name: tuple[bytes, int] | None) -> None:
        """Release all that was taken for a request, or only the payload `name` = (pool id, generation)."""
        with self._lock:
            taken = self._taken.get(request_id)
            if taken is None:
                return
            for one in list(taken.slots) if name is None else [name]:
                if one in taken.slots:
                    segment, page, word = taken.slots.pop(one)
                    segment.swap(page, word, 0)
            if name is None:
                del self._taken[request_id]

    def close(self) -> None:
        """Disconnect from all producers."""
        with self._lock:
            self._taken.clear()
            for line in self._lines.values():
                line.close()
            self._lines.clear()

    def _take_inline(self, found: Inline, request_id: str) -> Arrived | None:
        name = (found.pool, found.number)
        taken = self._taken.setdefault(request_id, _Taken())
        if name in taken.inline:
            return None
        payload = read_from(memoryview(bytearray(found.data)))
        taken.inline.add(name)
        return Arrived(payload, len(found.data))

    def _take_placed(self, found: Placed, request_id: str) -> Arrived | None:
        line = self._line(found)
        segment = line.segment(found.segment) if line is not None else None
        if line is None or segment is None:
            return None
        if not segment.holds(found.page, found.size):
            raise PayloadError(f"the metadata names {found.size} bytes at page {found.page}: outside the segment")
        waiting = put_word(found.generation)
        word = waiting + line.receiver
        if not segment.swap(found.page, waiting, word):
            return None
        if found.region is not None:
            try:
                return self._take_out(found, found.region, line, segment)
            finally:
                segment.swap(found.page, word, 0)
        try:
            payload = read_from(segment.view(found.page, found.size))
        except BaseException:  # also an interrupt: return the page to the producer, and tell the caller
            segment.swap(found.page, word, 0)
            raise
        slots = self._taken.setdefault(request_id, _Taken()).slots
        slots[found.pool, found.generation] = segment, found.page, word
        return Arrived(payload, found.size)

    def _take_out(self, found: Placed, on_device: OnDevice, line: Line, segment: Segment) -> Arrived | None:
        """Copy a payload with device tensors into this process's own memory; None if the tensors cannot be read."""
        region = self._read_device(on_device, line)
        if region is None:
            copied = line.host_copy(found.generation)
            if copied is None or len(copied) < on_device.size:
                return None
            region = torch.frombuffer(copied, dtype=torch.uint8)
        rest = memoryview(bytearray(segment.view(found.page, found.size)))
        return Arrived(read_from(rest, region), found.size + on_device.size)

    def _read_device(self, on_device: OnDevice, line: Line) -> Tensor | None:
        """Copy the region to this worker's device; None if it has none that can open the region."""
        if self._device is None:
            return None
        if on_device.handle not in line.imported:
            line.imported[on_device.handle] = self._device.open(on_device.handle)
        memory = line.imported[on_device.handle]
        return None if memory is None else memory.read(on_device.offset, on_device.size)

    def _line(self, found: Placed) -> Line | None:
        """Return the connection to the pool that the metadata name, opening it on first use; None if that fails."""
        line = self._lines.get(found.pool)
        if line is not None and not line.dropped:
            return line
        for pool_id, other in list(self._lines.items()):
            if other.dropped:
                other.close()
                del self._lines[pool_id]
        line = Line.open(found.address)
        if line is None:
            return None
        if line.pool_id != found.pool:  # a worker restarted under the same name
            line.close()
            return None
        self._lines[found.pool] = line
        return line
