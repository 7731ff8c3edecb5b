"""The shared-memory connector: `put` copies a payload in, `fetch` returns a view, a word in shared memory releases it.

Every worker process has one, for all its edges, as producer (with its own pool, which it shares with receivers) and as
consumer (of other workers' pools, each mapped once). Metadata are `kind: inline` with the bytes themselves, or
`kind: slot` with their place; `segment` documents the ownership of memory.

Tensors on a device do not pass through the host: they are copied into device memory that the consumer opens
(`device`), and their slot holds the rest. `fetch` copies such a payload out as a whole and releases its slot:
processes share device memory only for the length of one copy, so no death can invalidate what the consumer holds. A
consumer that cannot open that memory (another kind of device, no device, the same process) asks for a copy through the
host; the producer then sends all payloads of that edge through the host. Payloads for which the device has no space go
through the host, too.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

from segue.connectors.base import Arrived, Gone, Payload, Reach
from segue.connectors.device.memory import DeviceMemory, DevicePool, Region
from segue.connectors.payload import Encoded, measure, read_from
from segue.connectors.shm.handover import HandOver
from segue.connectors.shm.metadata import Inline, OnDevice, Placed, read, written
from segue.connectors.shm.pool import Pool, Slot
from segue.connectors.shm.receiver import Receiver
from segue.connectors.shm.segment import PAGE
from segue.messages.errors import ConfigError, StageFailed

POOL_BYTES = 64 << 20
MAX_BYTES = 1 << 30
THRESHOLD_BYTES = 65536
CUDA_POOL_BYTES = 256 << 20


class SharedMemoryConnector:
    """`Connector` over memfds, for processes of one user on one machine (Linux).

    `address`: the name under which others find this worker's pool; unique on the machine while it lives, 1–96 bytes.
    `shm_threshold_bytes`: smaller payloads travel in the metadata. `pool_bytes`: pre-faulted at once, and the step by
    which the pool grows up to `max_bytes`, which is also the largest payload. `device`: the accelerator whose tensors
    stay on it, in `cuda_pool_bytes` of its memory, allocated on first use (0: all go through the host). Raises
    `ConfigError` for invalid values.

    Thread-safe. The producer's `release` cannot withdraw a payload in metadata, which the consumer already has; it can
    withdraw one in a slot, until it is taken.
    """

    reach: Reach = "host"

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
        # a restarted worker may reuse a name; the id distinguishes its pool from the old one
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
        """Guards `_inlined`."""
        self._receiver = Receiver(self._device)
        self._inlined = 0
        self._closed = False

    def put(
        self, from_stage: str, to_stage: str, request_id: str, payload: Payload
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Return (ok, bytes, metadata); not ok while the pool is full.

        Raises `PayloadError` for a payload that cannot be sent, `StageFailed` for one larger than `max_bytes`.
        """
        self._check_open()
        encoded, region = self._lay_out((from_stage, to_stage), payload)
        if region is None and encoded.size < self._threshold:
            data = bytearray(encoded.size)
            encoded.write_into(memoryview(data))
            with self._lock:
                self._inlined += 1
                number = self._inlined
            return True, encoded.size, written(Inline(self._pool_id, number, bytes(data)))
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
        """Return a slot to compute into: (payload, bytes, metadata). The payload is `like` (its tensors may be on the
        meta device) with writable views of the slot as tensors. Nothing is copied; None while the pool is full.

        Fill the views, drop them, then send the metadata; `release` frees the slot.
        """
        self._check_open()
        encoded = measure(like)
        found = self._allocate(from_stage, to_stage, request_id, encoded.size)
        if found is None:
            return None
        slot, view = found
        encoded.write_into(view, skip_tensors=True)
        return read_from(view), encoded.size, self._metadata(slot, encoded.size)

    def fetch(
        self,
        from_stage: str,
        to_stage: str,
        request_id: str,
        metadata: dict[str, Any] | None,
        wake: Callable[[], None],
    ) -> Arrived | Gone:
        """Take a payload, with tensors as views of the producer's memory; see `Connector`. `wake` is never called."""
        self._check_open()
        found = read(metadata, f"the payload from {from_stage!r} to {to_stage!r}")
        taken = self._receiver.take(found, request_id)
        return Gone("its producer died, its request was released, or it was taken before") if taken is None else taken

    def release(self, request_id: str, metadata: dict[str, Any] | None = None) -> None:
        """Free the request's payloads that were put here and not taken, and those that were taken here.

        With the metadata of one payload, free only that one.
        """
        self._check_open()
        key: tuple[Any, Any] | None = (
            None if metadata is None else (metadata.get("pool"), metadata.get("generation", 0))
        )
        if key is None:
            self._pool.release(request_id)
        elif key[0] == self._pool_id:
            self._pool.withdraw(key[1])
        self._receiver.give_back(request_id, key)

    def close(self) -> None:
        """Disconnect from all producers, end the thread, close every descriptor. Existing views stay readable."""
        if self._closed:
            return
        self._closed = True
        self._receiver.close()
        self._hand_over.close()
        self._pool.close()
        if self._regions is not None:
            self._regions.close()

    @property
    def bytes_in_use(self) -> int:
        """Bytes of this worker's own pools that are put or taken; host memory counts in whole pages."""
        return self._pool.bytes_in_use + self.device_bytes_in_use

    @property
    def device_bytes_in_use(self) -> int:
        """The part of `bytes_in_use` that is on the device."""
        self._pool.sweep()
        return 0 if self._regions is None else self._regions.bytes_in_use

    def audit(self) -> None:
        """Assert that the pool's state is consistent; for idle moments and tests."""
        self._pool.audit()

    def _check_open(self) -> None:
        if self._closed:
            raise StageFailed(f"the shared-memory connector at {self._address!r} is closed")

    def _lay_out(self, edge: tuple[str, str], payload: Payload) -> tuple[Encoded, Region | None]:
        """Measure the payload and allocate a device region for tensors that stay there; None: all go to the host."""
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
        """Copy the device memory of a taken payload, which its receiver cannot open; runs in the hand-over's thread."""
        taken = self._pool.taken(generation, receiver)
        if taken is None or taken.region is None:
            return None
        region = taken.region
        self._through_host.add(region.edge)
        fd = os.memfd_create("segue-copy", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, region.size)
            region.memory.read_into(region.offset, memoryview(mmap.mmap(fd, region.size)))
        except OSError:  # no memory: this receiver loses the payload, which is sent again through the host
            os.close(fd)
            return None
        return fd, region.size

    def _allocate(
        self, from_stage: str, to_stage: str, request_id: str, size: int, region: Region | None = None
    ) -> tuple[Slot, memoryview] | None:
        """Allocate a slot of `size` bytes that owns `region`; None while the pool is full."""
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
        on_device = None if region is None else OnDevice(region.memory.handle, region.offset, region.size)
        return written(Placed(self._address, self._pool_id, slot.segment, slot.page, slot.generation, size, on_device))


def _give(region: Region | None) -> None:
    if region is not None:
        region.give()
