"""The connector over Mooncake's store: `put` puts a payload into memory that a receiver lends to the store, under a key
of its own; the consumer takes it out and removes the key."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import Annotated

import msgspec

from segue.connectors.base import Gone
from segue.connectors.fetching import Buffers, Consumer, SourceLost, Taken
from segue.connectors.mooncake.client import NOT_FOUND, Client, join
from segue.connectors.mooncake.library import check_protocol
from segue.connectors.payload import Encoded, read_from
from segue.connectors.remote import MAX_BYTES, THRESHOLD_BYTES, RemoteConnector, check_sizes
from segue.connectors.slots import IDLE_SECONDS
from segue.messages.errors import ConfigError

_MiB = 1 << 20


class Stored(msgspec.Struct, frozen=True, tag_field="kind", tag="mooncake_store"):
    """What names a payload in the store."""

    pool: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    number: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    size: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]

    @property
    def key(self) -> str:
        """A key is never used twice: the store would keep the old value, and say nothing."""
        return f"segue/{self.pool.hex()}/{self.number}"


class MooncakeStoreConnector(RemoteConnector):
    """`Connector` over a Mooncake store, whose master runs already.

    `host`: the address that others reach this machine by. `master`: `HOST:PORT`. `metadata_server`: its URL, or
    `P2PHANDSHAKE` to do without one. `segment`: bytes that a worker which receives payloads (`receives`) lends to the
    store. `localbuf`: bytes of Mooncake's own buffers. `proto`: `tcp` or `rdma`, the latter on the devices `rdma`.
    `max_bytes` bounds the payloads that are put and not yet fetched, and the largest one. Raises `ConfigError` for
    invalid values, a master that does not answer, and where Mooncake is not installed.

    A payload is gone if the receiver that lent the memory dies, or the master. The store has no space while it does not
    answer: see `client`.
    """

    def __init__(
        self,
        host: str,
        *,
        master: str = "127.0.0.1:50051",
        metadata_server: str = "P2PHANDSHAKE",
        segment: int = 512 * _MiB,
        localbuf: int = 64 * _MiB,
        proto: str = "tcp",
        rdma: str = "",
        receives: bool = True,
        inline_threshold_bytes: int = THRESHOLD_BYTES,
        max_bytes: int = MAX_BYTES,
        as_bfloat16: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        check_sizes(inline_threshold_bytes, max_bytes)
        check_protocol(proto, "proto")
        for name, value in (("segment", segment), ("localbuf", localbuf)):
            if value < _MiB:
                raise ConfigError(f"{name} is {value}; it must be at least 1 MiB", field=name)
        client = join(host, metadata_server, master, segment if receives else 0, localbuf, proto, rdma)
        super().__init__(
            "Mooncake",
            Stored,
            Keys(client, max_bytes),
            Consumer(lambda place: StoreSource(client, master), client.buffers),
            inline_threshold_bytes=inline_threshold_bytes,
            max_bytes=max_bytes,
            as_bfloat16=as_bfloat16,
            closed=client.close,
        )


class Keys:
    """The payloads that one worker has put into the store. Thread-safe."""

    def __init__(self, client: Client, max_bytes: int) -> None:
        self.pool_id = os.urandom(8)
        self._client = client
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._last = 0
        self._live: dict[int, tuple[str, Stored]] = {}
        """Number → request, payload."""

    def offer(self, request_id: str, encoded: Encoded) -> Stored | None:
        """Put a payload into the store; return its name, or None if there is no space now."""
        if self._held() + encoded.size > self._max_bytes and self.bytes_in_use + encoded.size > self._max_bytes:
            return None
        with self._lock:
            self._last += 1
            found = Stored(self.pool_id, self._last, encoded.size)
        if not self._client.put(found.key, encoded):
            return None
        with self._lock:
            self._live[found.number] = (request_id, found)
        return found

    def release(self, request_id: str) -> None:
        with self._lock:
            numbers = [number for number, (request, _) in self._live.items() if request == request_id]
        self._remove(numbers)

    def withdraw(self, number: int) -> None:
        self._remove([number])

    @property
    def bytes_in_use(self) -> int:
        with self._lock:
            keys = {found.key: number for number, (_, found) in self._live.items()}
        missing = self._client.missing(list(keys)) if keys else []
        with self._lock:
            for key in missing:
                self._live.pop(keys[key], None)
        return self._held()

    def close(self) -> None:
        with self._lock:
            numbers = list(self._live)
        self._remove(numbers)

    def _held(self) -> int:
        with self._lock:
            return sum(found.size for _, found in self._live.values())

    def _remove(self, numbers: Iterable[int]) -> None:
        with self._lock:
            found = [self._live.pop(number)[1].key for number in numbers if number in self._live]
        if found:
            self._client.remove(found)


class StoreSource:
    """A `Source` for the payloads of one producer in the store."""

    def __init__(self, client: Client, master: str) -> None:
        self.name = f"the Mooncake store of {master}"
        self._client = client
        self._used = time.monotonic()

    def fetch(self, place: Stored, buffers: Buffers) -> Taken | Gone:
        self._used = time.monotonic()
        buffer = buffers.take(place.size)
        got = self._client.take(place.key, buffer, place.size)
        if got == NOT_FOUND:
            buffers.give(buffer)
            return Gone("its request was released, or it was taken before, or the store's master was restarted")
        if got != place.size:
            buffers.set_aside(buffer)
            raise SourceLost(f"it returned {got} for a payload of {place.size} bytes")
        with buffers.filling(buffer):
            return Taken(read_from(memoryview(buffer)[: place.size]), place.size, buffer)

    def hung_up(self) -> bool:
        return time.monotonic() - self._used > IDLE_SECONDS

    def interrupt(self) -> None:
        """Mooncake's calls cannot be interrupted; they end by themselves."""

    def close(self) -> None:
        pass
