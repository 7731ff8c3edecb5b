"""The shared-memory connector: one copy in, a view out, released by a word in shared memory.

Every worker process has one, for all its edges, as producer (its own pool, handed to whoever asks for it) and as
consumer (the pools of others, each mapped once). Metadata is `kind: inline` with the bytes themselves, or `kind: slot`
with the place of the bytes; see `segment` for who owns which memory when.

Tensors on a device do not pass through the host: they are copied into device memory that the consumer opens (`device`),
and their slot holds the rest. Such a payload is taken out whole by `get`, and its slot released there: what is lent
between processes on a device is lent for the length of one copy, so nothing the consumer holds can go away under it,
whoever dies. Where the consumer cannot open that memory (another kind of device, none at all, the same process) it asks
for a copy through the host; the producer remembers, and the edge goes through the host from then on. So does what the
device has no room for.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from segue.connectors.base import Payload
from segue.connectors.device import DeviceMemory, DevicePool, Region
from segue.connectors.handover import HandOver, Line
from segue.connectors.payload import Encoded, PayloadError, measure, read_from
from segue.connectors.pool import Pool, Slot
from segue.connectors.segment import PAGE, Segment, put_word
from segue.messages.errors import ConfigError, StageFailed

POOL_BYTES = 64 << 20
MAX_BYTES = 1 << 30
THRESHOLD_BYTES = 65536
CUDA_POOL_BYTES = 256 << 20


class _Inline(msgspec.Struct, frozen=True, tag_field="kind", tag="inline"):
    pool: bytes
    number: int
    data: bytes


class _OnDevice(msgspec.Struct, frozen=True):
    handle: bytes
    offset: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    size: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]


class _Placed(msgspec.Struct, frozen=True, tag_field="kind", tag="slot"):
    address: str
    pool: bytes
    segment: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    page: Annotated[int, msgspec.Meta(ge=0)]
    generation: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
    size: Annotated[int, msgspec.Meta(ge=0)]
    region: _OnDevice | None = None


class _Taken(msgspec.Struct):
    """What the consumer holds for one request: until its release."""

    inline: set[tuple[bytes, int]] = msgspec.field(default_factory=set)
    slots: dict[tuple[bytes, int], tuple[Segment, int, int]] = msgspec.field(default_factory=dict)
    """(pool id, generation) → segment, page, word."""


class SharedMemoryConnector:
    """`Connector` over memfds, for processes of one user on one machine (Linux).

    `address`: the name under which others find this worker's pool; unique on the machine while it lives, 1–96 bytes.
    `shm_threshold_bytes`: smaller payloads ride in the metadata. `pool_bytes`: pre-faulted at once, and the step by
    which the pool grows up to `max_bytes`, which is also the largest payload. `device`: the accelerator whose tensors
    stay on it, in `cuda_pool_bytes` of its memory that are had when first needed (0: all go through the host). Raises
    `ConfigError` for values that cannot work.

    Thread-safe. A payload that rode in its metadata is with the consumer already and cannot be called back by the
    producer's `release`; one in a slot can, until it is taken.
    """

    def __init__(
        self,
        address: str,
        *,
        shm_threshold_bytes: int = THRESHOLD_BYTES,
        pool_bytes: int = POOL_BYTES,
        max_bytes: int = MAX_BYTES,
        cuda_pool_bytes: int = CUDA_POOL_BYTES,
        device: DeviceMemory | None = None,
    ) -> None:
        if shm_threshold_bytes < 0:
            raise ConfigError(
                f"shm_threshold_bytes is {shm_threshold_bytes}; it must be 0 or more", field="shm_threshold_bytes"
            )
        if pool_bytes < PAGE:
            raise ConfigError(f"pool_bytes is {pool_bytes}; it must be at least a page ({PAGE})", field="pool_bytes")
        if max_bytes < pool_bytes:
            raise ConfigError(
                f"max_bytes is {max_bytes}; it must be at least pool_bytes ({pool_bytes})", field="max_bytes"
            )
        if cuda_pool_bytes < 0:
            raise ConfigError(f"cuda_pool_bytes is {cuda_pool_bytes}; it must be 0 or more", field="cuda_pool_bytes")
        self._device = device if cuda_pool_bytes else None
        self._regions = DevicePool(device, cuda_pool_bytes) if device is not None and cuda_pool_bytes else None
        self._through_host: set[tuple[str, str]] = set()
        """Edges with a consumer that could not open this worker's device memory."""
        self._address = address
        self._threshold = shm_threshold_bytes
        self._max_bytes = max_bytes
        # a name may be used again by a restarted worker; the id tells its pool from the old one
        self._pool_id = os.urandom(8)
        try:
            self._pool = Pool(pool_bytes, max_bytes)
        except OSError as error:
            raise ConfigError(f"pool_bytes is {pool_bytes}: {error.strerror}", field="pool_bytes") from error
        try:
            self._hand_over = HandOver(address, self._pool_id, self._pool, self._copy_to_host)
        except BaseException:
            self._pool.close()
            raise
        self._lock = threading.Lock()
        self._lines: dict[bytes, Line] = {}
        self._taken: dict[str, _Taken] = {}
        self._inlined = 0
        self._closed = False

    def put(
        self, from_stage: str, to_stage: str, request_id: str, payload: Payload
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """(ok, bytes, metadata); not ok while the pool is full.

        Raises `PayloadError` for a payload that cannot travel, `StageFailed` for one larger than `max_bytes`.
        """
        self._check_open()
        encoded, region = self._lay_out((from_stage, to_stage), payload)
        if region is None and encoded.size < self._threshold:
            data = bytearray(encoded.size)
            encoded.write_into(memoryview(data))
            with self._lock:
                self._inlined += 1
                number = self._inlined
            return (
                True,
                encoded.size,
                msgspec.to_builtins(_Inline(self._pool_id, number, bytes(data)), builtin_types=_WIRE),
            )
        size = encoded.size + encoded.apart_size
        try:
            found = self._allocate(from_stage, to_stage, request_id, encoded.size, region)
        except StageFailed:
            _give(region)
            raise
        if found is None:
            _give(region)
            return False, size, None
        slot, view = found
        try:
            encoded.write_into(view)
            if region is not None and self._device is not None:
                for offset, tensor in encoded.apart:
                    region.memory.write(region.offset + offset, tensor)
                self._device.settle()
        except BaseException:
            self._pool.withdraw(slot.generation)
            raise
        return True, size, self._metadata(slot, encoded.size)

    def reserve(
        self, from_stage: str, to_stage: str, request_id: str, like: Payload
    ) -> tuple[Payload, int, dict[str, Any]] | None:
        """A slot to compute into: (payload, bytes, metadata), where the payload is `like` (its tensors may be on the
        meta device) with writable views of the slot for tensors. No copy at all; None while the pool is full.

        Fill the views, drop them, then send the metadata; `release` takes the slot back.
        """
        self._check_open()
        encoded = measure(like)
        found = self._allocate(from_stage, to_stage, request_id, encoded.size)
        if found is None:
            return None
        slot, view = found
        encoded.write_into(view, skip_tensors=True)
        return read_from(view), encoded.size, self._metadata(slot, encoded.size)

    def get(
        self, from_stage: str, to_stage: str, request_id: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Payload, int] | None:
        """(payload, bytes), its tensors views of the producer's memory; None where it is gone or was taken before.

        Raises `PayloadError` for metadata that no `put` has returned.
        """
        self._check_open()
        place = f"the payload from {from_stage!r} to {to_stage!r}"
        try:
            found = msgspec.convert(metadata, _Inline | _Placed)
        except msgspec.ValidationError as error:
            raise PayloadError(f"{place} came with broken metadata: {error}", field="metadata") from error
        with self._lock:
            if isinstance(found, _Inline):
                return self._get_inline(found, request_id)
            return self._get_placed(found, request_id)

    def release(self, request_id: str, metadata: dict[str, Any] | None = None) -> None:
        """Free what was put for the request and nobody has taken, and what was taken for it here.

        With the metadata of one payload: only that one.
        """
        self._check_open()
        key = None if metadata is None else (metadata.get("pool"), metadata.get("generation", 0))
        if key is None:
            self._pool.release(request_id)
        elif key[0] == self._pool_id:
            self._pool.withdraw(key[1])
        with self._lock:
            taken = self._taken.get(request_id)
            if taken is None:
                return
            for name in list(taken.slots) if key is None else [key]:
                if name in taken.slots:
                    segment, page, word = taken.slots.pop(name)
                    segment.swap(page, word, 0)
            if key is None:
                del self._taken[request_id]

    def close(self) -> None:
        """Hang up on all producers, end the thread, close every descriptor. Views made before stay readable."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            self._taken.clear()
            for line in self._lines.values():
                line.close()
            self._lines.clear()
        self._hand_over.close()
        self._pool.close()
        if self._regions is not None:
            self._regions.close()

    @property
    def bytes_in_use(self) -> int:
        """Bytes of this worker's own pools that are put or taken, on the host in whole pages."""
        return self._pool.bytes_in_use + self.device_bytes_in_use

    @property
    def device_bytes_in_use(self) -> int:
        """Of them, bytes on the device."""
        self._pool.sweep()
        return 0 if self._regions is None else self._regions.bytes_in_use

    def audit(self) -> None:
        """Assert that the pool's books are right; for idle moments and tests."""
        self._pool.audit()

    def _check_open(self) -> None:
        if self._closed:
            raise StageFailed(f"the shared-memory connector at {self._address!r} is closed")

    def _lay_out(self, edge: tuple[str, str], payload: Payload) -> tuple[Encoded, Region | None]:
        """The payload measured, with room on the device for what is to stay there; None: all of it is for the host."""
        if self._device is None or self._regions is None or edge in self._through_host:
            return measure(payload), None
        encoded = measure(payload, self._device.owns)
        if not encoded.apart:
            return encoded, None
        if encoded.size + encoded.apart_size >= self._threshold:
            self._pool.sweep()
            region = self._regions.take(edge, encoded.apart_size)
            if region is not None:
                return encoded, region
        return measure(payload), None

    def _copy_to_host(self, generation: int, receiver: int) -> tuple[int, int] | None:
        """For a receiver that cannot open the device memory of what it has taken; in the hand-over's thread."""
        taken = self._pool.taken(generation, receiver)
        if taken is None or taken.region is None:
            return None
        region = taken.region
        self._through_host.add(region.edge)
        fd = os.memfd_create("segue-copy", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, region.size)
            region.memory.read_into(region.offset, memoryview(mmap.mmap(fd, region.size)))
        except OSError:  # no memory: the payload is lost to this receiver, and sent again through the host
            os.close(fd)
            return None
        return fd, region.size

    def _allocate(
        self, from_stage: str, to_stage: str, request_id: str, size: int, region: Region | None = None
    ) -> tuple[Slot, memoryview] | None:
        """A slot of `size` bytes, with a region beside it; None while the pool is full."""
        whole = size + (region.size if region is not None else 0)
        if not self._pool.fits(whole):
            raise StageFailed(
                f"a payload from {from_stage!r} to {to_stage!r} has {whole} bytes; the connector's max_bytes is "
                f"{self._max_bytes}",
                field="max_bytes",
                stage=from_stage,
            )
        return self._pool.allocate(request_id, size, region)

    def _metadata(self, slot: Slot, size: int) -> dict[str, Any]:
        region = slot.region
        on_device = None if region is None else _OnDevice(region.memory.handle, region.offset, region.size)
        placed = _Placed(self._address, self._pool_id, slot.segment, slot.page, slot.generation, size, on_device)
        return msgspec.to_builtins(placed, builtin_types=_WIRE)

    def _get_inline(self, found: _Inline, request_id: str) -> tuple[Payload, int] | None:
        name = (found.pool, found.number)
        taken = self._taken.setdefault(request_id, _Taken())
        if name in taken.inline:
            return None
        payload = read_from(memoryview(bytearray(found.data)))
        taken.inline.add(name)
        return payload, len(found.data)

    def _get_placed(self, found: _Placed, request_id: str) -> tuple[Payload, int] | None:
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
        except BaseException:
            segment.swap(found.page, word, 0)
            raise
        slots = self._taken.setdefault(request_id, _Taken()).slots
        slots[found.pool, found.generation] = segment, found.page, word
        return payload, found.size

    def _take_out(
        self, found: _Placed, on_device: _OnDevice, line: Line, segment: Segment
    ) -> tuple[Payload, int] | None:
        """A payload with tensors of a device, as this process's own; None where they cannot be had."""
        region = self._read_device(on_device, line)
        if region is None:
            copied = line.host_copy(found.generation)
            if copied is None or len(copied) < on_device.size:
                return None
            region = torch.frombuffer(copied, dtype=torch.uint8)
        rest = memoryview(bytearray(segment.view(found.page, found.size)))
        return read_from(rest, region), found.size + on_device.size

    def _read_device(self, on_device: _OnDevice, line: Line) -> Tensor | None:
        """The region's bytes on this worker's device; None where it has none that reaches them."""
        if self._device is None:
            return None
        if on_device.handle not in line.imported:
            line.imported[on_device.handle] = self._device.open(on_device.handle)
        memory = line.imported[on_device.handle]
        return None if memory is None else memory.read(on_device.offset, on_device.size)

    def _line(self, found: _Placed) -> Line | None:
        """The line to the pool that the metadata names; opened now if it is the first time."""
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


def _give(region: Region | None) -> None:
    if region is not None:
        region.give()


_WIRE = (bytes,)
"""Types that msgpack carries as they are: `to_builtins` would make base64 text of bytes."""
