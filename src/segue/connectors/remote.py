"""What connectors between hosts share: payloads below a threshold travel in the metadata, others wait at the producer
(`Offers`) until the consumer has fetched them (`fetching`).

Optional reading: only connectors between hosts use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from segue.connectors.base import Arrived, Fetched, Gone, Payload, Reach
from segue.connectors.fetching import Consumer
from segue.connectors.narrow import narrowed, upcast
from segue.connectors.payload import Encoded, PayloadError, measure, read_from
from segue.connectors.shm.metadata import Inline, written
from segue.messages.errors import ConfigError, StageFailed

MAX_BYTES = 1 << 30
THRESHOLD_BYTES = 65536


class Offers(Protocol):
    """The payloads that one worker offers to others. Thread-safe."""

    @property
    def pool_id(self) -> bytes:
        """Names this producer among all."""

    @property
    def bytes_in_use(self) -> int:
        """Bytes that are offered and not yet fetched."""

    def offer(self, request_id: str, encoded: Encoded) -> msgspec.Struct | None:
        """Keep a payload until it is fetched or released; return its place (`fetching.Place`, with its `size`), or None
        if there is no space now."""

    def release(self, request_id: str) -> None:
        """Free the payloads of a request."""

    def withdraw(self, number: int) -> None:
        """Free one payload; unknown numbers are ignored."""

    def close(self) -> None:
        """Free everything."""


class RemoteConnector:
    """`Connector` between processes on any hosts. Thread-safe.

    `place`: the tagged struct that travels as metadata. `max_bytes` bounds the largest payload. `as_bfloat16`: edges
    whose float32 tensors travel as bfloat16 (`narrow`).
    """

    reach: Reach = "network"

    def __init__(
        self,
        name: str,
        place: type[msgspec.Struct],
        offers: Offers,
        consumer: Consumer,
        *,
        inline_threshold_bytes: int,
        max_bytes: int,
        as_bfloat16: frozenset[tuple[str, str]],
        closed: Callable[[bool], None] = lambda idle: None,
    ) -> None:
        """`closed` is called at the end; `idle`: no thread fetches any more."""
        self._ended = closed
        self._name = name
        self._place = place
        self._offers = offers
        self._consumer = consumer
        self._threshold = inline_threshold_bytes
        self._max_bytes = max_bytes
        self._as_bfloat16 = as_bfloat16
        self._inlined = 0
        self._closed = False

    def put(
        self, from_stage: str, to_stage: str, request_id: str, payload: Payload
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Return (ok, bytes, metadata); not ok while there is no space. The payload's tensors must not change any more.

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
            inline = written(Inline(self._offers.pool_id, self._inlined, bytes(data)))
            return True, encoded.size, {**inline, "bfloat16": narrow}
        if encoded.size > self._max_bytes:
            raise StageFailed(
                f"a payload from {from_stage!r} to {to_stage!r} has {encoded.size} bytes; the connector's max_bytes is "
                f"{self._max_bytes}",
                field="max_bytes",
                stage=from_stage,
            )
        place = self._offers.offer(request_id, encoded)
        if place is None:
            return False, encoded.size, None
        return True, encoded.size, {**msgspec.to_builtins(place, builtin_types=(bytes,)), "bfloat16": narrow}

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
            place: Any = msgspec.convert(metadata, Inline | self._place)
        except msgspec.ValidationError as error:
            raise PayloadError(
                f"the payload from {from_stage!r} to {to_stage!r} came with broken metadata: {error}", field="metadata"
            ) from error
        if isinstance(place, Inline):
            found: Fetched = self._inline(place, request_id)
        else:
            found = self._consumer.fetch(place, request_id, wake)
        if isinstance(found, Arrived) and metadata is not None and metadata.get("bfloat16"):
            return Arrived(upcast(found.payload), found.nbytes)
        return found

    def release(self, request_id: str, metadata: dict[str, Any] | None = None) -> None:
        """Free the request's payloads that were put here and not fetched, and those fetched here; or one of them."""
        self._check_open()
        if metadata is None:
            self._offers.release(request_id)
            self._consumer.release(request_id, None)
            return
        pool, number = metadata.get("pool"), metadata.get("number")
        if metadata.get("kind") == "inline" or not isinstance(pool, bytes) or not isinstance(number, int):
            return
        if pool == self._offers.pool_id:
            self._offers.withdraw(number)
        self._consumer.release(request_id, (pool, number))

    def close(self) -> None:
        """Disconnect from all peers, end the threads, free everything. Existing tensors stay readable."""
        if self._closed:
            return
        self._closed = True
        idle = self._consumer.close()
        self._offers.close()
        self._ended(idle)

    @property
    def bytes_in_use(self) -> int:
        """Bytes that are put and not yet fetched."""
        return self._offers.bytes_in_use

    def _inline(self, found: Inline, request_id: str) -> Arrived | Gone:
        payload = read_from(memoryview(bytearray(found.data)))
        if not self._consumer.taken_inline(request_id, found.pool, found.number):
            return Gone("it was taken before")
        return Arrived(payload, len(found.data))

    def _check_open(self) -> None:
        if self._closed:
            raise StageFailed(f"the {self._name} connector is closed")


def check_sizes(inline_threshold_bytes: int, max_bytes: int) -> None:
    """Raise `ConfigError` for an invalid size."""
    if inline_threshold_bytes < 0:
        raise ConfigError(
            f"inline_threshold_bytes is {inline_threshold_bytes}; it must be 0 or more",
            field="inline_threshold_bytes",
        )
    if max_bytes < 1:
        raise ConfigError(f"max_bytes is {max_bytes}; it must be at least 1", field="max_bytes")
