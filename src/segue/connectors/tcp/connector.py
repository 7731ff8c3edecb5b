"""The TCP connector: `put` keeps a payload where it is, the consumer fetches it over a plain socket of its own.

Payloads below `inline_threshold_bytes` travel in the metadata. Others are sent straight from the producer's tensors
(those on a device are copied to the host once) and received into memory that is used again: one copy on each side, the
kernel's. Both sides prove that they know the key of the system (`wire`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from segue.connectors.base import Arrived, Fetched, Gone, Payload, Reach
from segue.connectors.narrow import narrowed, widened
from segue.connectors.payload import PayloadError, measure, read_from
from segue.connectors.shm_metadata import Inline, written
from segue.connectors.tcp.consumer import Consumer, Place
from segue.connectors.tcp.producer import Producer
from segue.messages.errors import ConfigError, StageFailed

MAX_BYTES = 1 << 30
THRESHOLD_BYTES = 65536


class Remote(msgspec.Struct, frozen=True, tag_field="kind", tag="tcp"):
    """Where a payload is to be fetched."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
    pool: bytes
    number: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    size: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    bfloat16: bool = False
    """Its float32 tensors travel as bfloat16."""


class TcpConnector:
    """`Connector` over TCP, for processes on any hosts that reach each other.

    `host`: the address of the interface that others reach this worker by; it listens there, and nowhere else. `key`:
    the secret of the system, at least 32 bytes. `max_bytes` bounds the payloads that are put and not yet fetched, and
    the largest one. `as_bfloat16`: edges whose float32 tensors travel as bfloat16 (`narrow`). Raises `ConfigError` for
    invalid values.

    Thread-safe. A payload of a producer that dies is gone; one whose link is down for less than
    `wire.SILENCE_SECONDS` arrives.
    """

    reach: Reach = "network"

    def __init__(
        self,
        host: str,
        key: bytes,
        *,
        inline_threshold_bytes: int = THRESHOLD_BYTES,
        max_bytes: int = MAX_BYTES,
        as_bfloat16: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        if len(key) < 32:
            raise ConfigError(f"the key has {len(key)} bytes; it must have at least 32", field="key")
        if inline_threshold_bytes < 0:
            raise ConfigError(
                f"inline_threshold_bytes is {inline_threshold_bytes}; it must be 0 or more",
                field="inline_threshold_bytes",
            )
        if max_bytes < 1:
            raise ConfigError(f"max_bytes is {max_bytes}; it must be at least 1", field="max_bytes")
        self._threshold = inline_threshold_bytes
        self._max_bytes = max_bytes
        self._as_bfloat16 = as_bfloat16
        self._producer = Producer(host, key, max_bytes)
        self._consumer = Consumer(key)
        self._inlined = 0
        self._closed = False

    def put(
        self, from_stage: str, to_stage: str, request_id: str, payload: Payload
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Return (ok, bytes, metadata); not ok while `max_bytes` wait. The payload's tensors must not change any more.

        Raises `PayloadError` for a payload that cannot be sent, `StageFailed` for one larger than `max_bytes`.
        """
        self._check_open()
        narrow = (from_stage, to_stage) in self._as_bfloat16
        if narrow:
            measure(payload)  # names the path of a value that cannot be sent as the producer knows it
        encoded = measure(narrowed(payload) if narrow else payload)
        if encoded.size < self._threshold:
            data = bytearray(encoded.size)
            encoded.write_into(memoryview(data))
            self._inlined += 1
            inline = written(Inline(self._producer.pool_id, self._inlined, bytes(data)))
            return True, encoded.size, {**inline, "bfloat16": narrow}
        if not self._producer.fits(encoded.size):
            raise StageFailed(
                f"a payload from {from_stage!r} to {to_stage!r} has {encoded.size} bytes; the connector's max_bytes is "
                f"{self._max_bytes}",
                field="max_bytes",
                stage=from_stage,
            )
        number = self._producer.offer(request_id, encoded)
        if number is None:
            return False, encoded.size, None
        producer = self._producer
        place = Remote(producer.host, producer.port, producer.pool_id, number, encoded.size, narrow)
        return True, encoded.size, msgspec.to_builtins(place, builtin_types=(bytes,))

    def fetch(
        self,
        from_stage: str,
        to_stage: str,
        request_id: str,
        metadata: dict[str, Any] | None,
        wake: Callable[[], None],
    ) -> Fetched:
        """Take a payload, without waiting for it; see `Connector`."""
        self._check_open()
        try:
            place = msgspec.convert(metadata, Inline | Remote)
        except msgspec.ValidationError as error:
            raise PayloadError(
                f"the payload from {from_stage!r} to {to_stage!r} came with broken metadata: {error}", field="metadata"
            ) from error
        if isinstance(place, Inline):
            found: Fetched = self._inline(place, request_id)
        else:
            where = Place(place.host, place.port, place.pool, place.number, place.size)
            found = self._consumer.fetch(where, request_id, wake)
        if isinstance(found, Arrived) and metadata is not None and metadata.get("bfloat16"):
            return Arrived(widened(found.payload), found.nbytes)
        return found

    def release(self, request_id: str, metadata: dict[str, Any] | None = None) -> None:
        """Free the request's payloads that were put here and not fetched, and those fetched here; or one of them."""
        self._check_open()
        if metadata is None:
            self._producer.release(request_id)
            self._consumer.release(request_id, None)
            return
        pool, number = metadata.get("pool"), metadata.get("number")
        if metadata.get("kind") != "tcp" or not isinstance(pool, bytes) or not isinstance(number, int):
            return
        if pool == self._producer.pool_id:
            self._producer.withdraw(number)
        self._consumer.release(request_id, (pool, number))

    def close(self) -> None:
        """Disconnect from all peers, end the threads, free everything. Existing tensors stay readable."""
        if self._closed:
            return
        self._closed = True
        self._consumer.close()
        self._producer.close()

    @property
    def bytes_in_use(self) -> int:
        """Bytes that are put and not yet fetched."""
        return self._producer.bytes_in_use

    def _inline(self, found: Inline, request_id: str) -> Arrived | Gone:
        payload = read_from(memoryview(bytearray(found.data)))
        if not self._consumer.taken_inline(request_id, found.pool, found.number):
            return Gone("it was taken before")
        return Arrived(payload, len(found.data))

    def _check_open(self) -> None:
        if self._closed:
            raise StageFailed("the TCP connector is closed")
