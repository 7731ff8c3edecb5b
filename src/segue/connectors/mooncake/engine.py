"""The connector over Mooncake's transfer engine: `put` writes a payload into registered memory, the consumer reads it
from there. The producer's process does nothing meanwhile.

    | pool id | number | taken | 0 … | payload |     a slot: what the consumer reads in one piece
    0         8        16      24    64

A payload is the slot's if its number is in the slot before and after the reading: the producer clears the number before
it uses the memory again. The consumer then writes the number as `taken`, which frees the slot; should the slot have
another payload by then, its number is another, and nothing happens.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

import msgspec

from segue.connectors.base import Gone
from segue.connectors.fetching import Buffers, Consumer, SourceLost, Taken
from segue.connectors.intervals import Intervals
from segue.connectors.mooncake.library import IDLE_SECONDS, Memory, address_of, check_protocol, load
from segue.connectors.payload import Encoded, read_from
from segue.connectors.remote import MAX_BYTES, THRESHOLD_BYTES, RemoteConnector, check_sizes
from segue.messages.errors import ConfigError

_HEADER = 64
"""Bytes before a payload; also the unit of allocation, so that payloads are aligned."""
_WORD = 8
_LOOKS = 16
"""Slots that are checked before each new one, so that memory is used again while it is warm in the cache."""


class InMemory(msgspec.Struct, frozen=True, tag_field="kind", tag="mooncake_engine"):
    """Where a payload is to be read."""

    session: str
    """`HOST:PORT` of the producer's engine."""
    address: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    pool: Annotated[bytes, msgspec.Meta(min_length=_WORD, max_length=_WORD)]
    number: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    size: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]


class MooncakeEngineConnector(RemoteConnector):
    """`Connector` over Mooncake's transfer engine.

    `host`: the address that others reach this machine by. `protocol`: `tcp` or `rdma`, the latter on the devices
    `device_name` (separated by commas; empty: those that Mooncake chooses). `max_bytes`: memory that is registered, and
    bounds the payloads that are put and not yet fetched. Raises `ConfigError` for invalid values, and where Mooncake is
    not installed.

    A payload of a producer that dies is gone; Mooncake waits 30 s for one that is cut off.
    """

    def __init__(
        self,
        host: str,
        *,
        protocol: str = "tcp",
        device_name: str = "",
        inline_threshold_bytes: int = THRESHOLD_BYTES,
        max_bytes: int = MAX_BYTES,
        as_bfloat16: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        check_sizes(inline_threshold_bytes, max_bytes)
        check_protocol(protocol, "protocol")
        engine = load("engine").TransferEngine()
        if (code := engine.initialize(host, "P2PHANDSHAKE", protocol, device_name)) != 0:
            raise ConfigError(
                f"Mooncake's transfer engine does not start on {host!r} with {protocol}: it returned {code}",
                field="protocol",
            )
        memory = Memory(engine, "register_memory", "unregister_memory")
        super().__init__(
            "Mooncake",
            InMemory,
            Slots(memory, f"{host}:{engine.get_rpc_port()}", max_bytes),
            Consumer(lambda place: EngineSource(place, memory), Buffers(memory.add, memory.drop)),
            inline_threshold_bytes=inline_threshold_bytes,
            max_bytes=max_bytes,
            as_bfloat16=as_bfloat16,
            closed=memory.close,
        )


@dataclass(frozen=True, slots=True)
class _Slot:
    number: int
    unit: int
    """The first of its units of `_HEADER` bytes."""
    units: int
    size: int
    request_id: str


class Slots:
    """The payloads that one worker offers, in memory that others read. Thread-safe."""

    def __init__(self, memory: Memory, session: str, max_bytes: int) -> None:
        whole = -(-(max_bytes + 2 * _HEADER) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.pool_id = os.urandom(_WORD)
        self._memory = memory
        self._buffer = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.add(self._buffer)
        self._start = address_of(self._buffer)
        self._session = session
        self._words = memoryview(self._buffer).cast("Q")
        self._intervals = Intervals(whole // _HEADER)
        self._lock = threading.Lock()
        self._live: OrderedDict[int, _Slot] = OrderedDict()
        self._requests: dict[str, set[int]] = {}
        self._last = 0

    def offer(self, request_id: str, encoded: Encoded) -> InMemory | None:
        """Copy a payload to where others read it; return its place, or None if there is no space now."""
        units = 1 - (-encoded.size // _HEADER)
        with self._lock:
            self._look(_LOOKS)
            unit = self._intervals.take(units)
            if unit is None:
                self._look(len(self._live))
                unit = self._intervals.take(units)
            if unit is None:
                return None
        at = unit * _HEADER
        try:
            encoded.write_into(memoryview(self._buffer)[at + _HEADER : at + _HEADER + encoded.size])
        except BaseException:
            with self._lock:
                self._intervals.give(unit, units)
            raise
        with self._lock:
            self._last += 1
            slot = _Slot(self._last, unit, units, encoded.size, request_id)
            self._live[slot.number] = slot
            self._requests.setdefault(request_id, set()).add(slot.number)
            word = at // _WORD
            self._words[word] = int.from_bytes(self.pool_id, "little")
            self._words[word + 2] = 0
            self._words[word + 1] = slot.number  # last: with it the slot is the payload's
        return InMemory(self._session, self._start + at, self.pool_id, slot.number, slot.size)

    def release(self, request_id: str) -> None:
        with self._lock:
            for number in list(self._requests.get(request_id, ())):
                self._free(self._live[number])

    def withdraw(self, number: int) -> None:
        with self._lock:
            if number in self._live:
                self._free(self._live[number])

    @property
    def bytes_in_use(self) -> int:
        with self._lock:
            self._look(len(self._live))
            return sum(slot.size for slot in self._live.values())

    def close(self) -> None:
        """Free everything; what somebody reads just now is gone."""
        with self._lock:
            for slot in list(self._live.values()):
                self._free(slot)
            self._words.release()

    def _look(self, count: int) -> None:
        """Free those of the `count` slots unchecked for longest that are taken."""
        for _ in range(min(count, len(self._live))):
            number, slot = next(iter(self._live.items()))
            if self._words[slot.unit * _HEADER // _WORD + 2] == number:
                self._free(slot)
            else:
                self._live.move_to_end(number)

    def _free(self, slot: _Slot) -> None:
        self._words[slot.unit * _HEADER // _WORD + 1] = 0
        self._intervals.give(slot.unit, slot.units)
        del self._live[slot.number]
        numbers = self._requests[slot.request_id]
        numbers.discard(slot.number)
        if not numbers:
            del self._requests[slot.request_id]


class EngineSource:
    """A `Source` that reads the memory of one producer."""

    def __init__(self, place: InMemory, memory: Memory) -> None:
        self.name = place.session
        self._memory = memory
        self._used = time.monotonic()

    def fetch(self, place: InMemory, buffers: Buffers) -> Taken | Gone:
        self._used = time.monotonic()
        engine = self._memory.client
        whole = _HEADER + place.size
        buffer = buffers.take(whole)
        at = address_of(buffer)
        for count in (whole, _HEADER):  # the header again: it was this payload's all the time
            code = engine.transfer_sync_read(place.session, at, place.address, count)
            if code != 0:
                buffers.set_aside(buffer)
                raise SourceLost(f"Mooncake read nothing: it returned {code}")
            if not _holds(buffer, place):
                buffers.give(buffer)
                return Gone("its request was released, or it was taken before")
        mark = 2 * _WORD
        buffer[mark : mark + _WORD] = place.number.to_bytes(_WORD, "little")
        # if nothing arrives of this, the slot is freed with its request
        engine.transfer_sync_write(place.session, at + mark, place.address + mark, _WORD)
        with buffers.filling(buffer):
            return Taken(read_from(memoryview(buffer)[_HEADER:whole]), place.size, buffer)

    def hung_up(self) -> bool:
        return time.monotonic() - self._used > IDLE_SECONDS

    def interrupt(self) -> None:
        """Mooncake's calls cannot be interrupted; they end by themselves."""

    def close(self) -> None:
        pass


def _holds(buffer: mmap.mmap, place: InMemory) -> bool:
    """Whether a slot's header says that its payload is the one looked for, and nobody has taken it."""
    number = int.from_bytes(buffer[_WORD : 2 * _WORD], "little")
    taken = int.from_bytes(buffer[2 * _WORD : 3 * _WORD], "little")
    return buffer[:_WORD] == place.pool and number == place.number != taken
