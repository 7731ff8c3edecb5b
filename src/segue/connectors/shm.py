"""The shared-memory connector: one copy in, a view out, released by a word in shared memory.

Every worker process has one, for all its edges, as producer (its own pool, handed to whoever asks for it) and as
consumer (the pools of others, each mapped once). Metadata is `kind: inline` with the bytes themselves, or `kind: slot`
with the place of the bytes; see `segment` for who owns which memory when.
"""

from __future__ import annotations

import os
import threading
from typing import Annotated, Any

import msgspec

from segue.connectors.base import Payload
from segue.connectors.handover import HandOver, Line
from segue.connectors.payload import PayloadError, measure, read_from
from segue.connectors.pool import Pool, Slot
from segue.connectors.segment import PAGE, Segment, put_word
from segue.messages.errors import ConfigError, StageFailed

POOL_BYTES = 64 << 20
MAX_BYTES = 1 << 30
THRESHOLD_BYTES = 65536


class _Inline(msgspec.Struct, frozen=True, tag_field="kind", tag="inline"):
    pool: bytes
    number: int
    data: bytes


class _Placed(msgspec.Struct, frozen=True, tag_field="kind", tag="slot"):
    address: str
    pool: bytes
    segment: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    page: Annotated[int, msgspec.Meta(ge=0)]
    generation: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
    size: Annotated[int, msgspec.Meta(ge=0)]


class _Taken(msgspec.Struct):
    """What the consumer holds for one request: until its release."""

    inline: set[tuple[bytes, int]] = msgspec.field(default_factory=set)
    slots: dict[tuple[bytes, int], tuple[Segment, int, int]] = msgspec.field(default_factory=dict)
    """(pool id, generation) → segment, page, word."""


class SharedMemoryConnector:
    """`Connector` over memfds, for processes of one user on one machine (Linux).

    `address`: the name under which others find this worker's pool; unique on the machine while it lives, 1–96 bytes.
    `shm_threshold_bytes`: smaller payloads ride in the metadata. `pool_bytes`: pre-faulted at once, and the step by
    which the pool grows up to `max_bytes`, which is also the largest payload. Raises `ConfigError` for values that
    cannot work.

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
            self._hand_over = HandOver(address, self._pool_id, self._pool)
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
        encoded = measure(payload)
        if encoded.size < self._threshold:
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
        found = self._allocate(from_stage, to_stage, request_id, encoded.size)
        if found is None:
            return False, encoded.size, None
        slot, view = found
        try:
            encoded.write_into(view)
        except BaseException:
            self._pool.withdraw(slot.generation)
            raise
        return True, encoded.size, self._metadata(slot, encoded.size)

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

    @property
    def bytes_in_use(self) -> int:
        """Bytes of this worker's own pool that are put or taken, in whole pages."""
        return self._pool.bytes_in_use

    def audit(self) -> None:
        """Assert that the pool's books are right; for idle moments and tests."""
        self._pool.audit()

    def _check_open(self) -> None:
        if self._closed:
            raise StageFailed(f"the shared-memory connector at {self._address!r} is closed")

    def _allocate(self, from_stage: str, to_stage: str, request_id: str, size: int) -> tuple[Slot, memoryview] | None:
        if not self._pool.fits(size):
            raise StageFailed(
                f"a payload from {from_stage!r} to {to_stage!r} has {size} bytes; the connector's max_bytes is "
                f"{self._max_bytes}",
                field="max_bytes",
                stage=from_stage,
            )
        return self._pool.allocate(request_id, size)

    def _metadata(self, slot: Slot, size: int) -> dict[str, Any]:
        placed = _Placed(self._address, self._pool_id, slot.segment, slot.page, slot.generation, size)
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
        try:
            payload = read_from(segment.view(found.page, found.size))
        except BaseException:
            segment.swap(found.page, word, 0)
            raise
        slots = self._taken.setdefault(request_id, _Taken()).slots
        slots[found.pool, found.generation] = segment, found.page, word
        return payload, found.size

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


_WIRE = (bytes,)
"""Types that msgpack carries as they are: `to_builtins` would make base64 text of bytes."""
