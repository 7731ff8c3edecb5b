"""Payloads in registered memory that consumers read by themselves, with one-sided reads: the producer's process does
nothing meanwhile. Mooncake's transfer engine and NIXL carry them.

    | pool id | number | taken | 0 … | payload |     a slot: what the consumer reads in one piece
    0         8        16      24    64

A payload is the slot's if its number is in the slot before and after the reading: the producer clears the number before
it uses the memory again. The consumer then writes the number as `taken`, which frees the slot; should the slot have
another payload by then, its number is another, and nothing happens.

Optional reading: only connectors between hosts use it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec

from segue.connectors.base import Gone
from segue.connectors.fetching import Buffers, SourceLost, Taken
from segue.connectors.intervals import Intervals
from segue.connectors.payload import Encoded, read_from

IDLE_SECONDS = 60.0
"""After which a producer that was asked for nothing is taken for ended: such libraries do not tell."""
_HEADER = 64
"""Bytes before a payload; also the unit of allocation, so that payloads are aligned."""
_WORD = 8
_LOOKS = 16
"""Slots that are checked before each new one, so that memory is used again while it is warm in the cache."""


class SlotPlace(msgspec.Struct, frozen=True):
    """Where a payload lies; a library adds how its producer is reached."""

    address: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    """Of its slot, in its producer's process."""
    pool: Annotated[bytes, msgspec.Meta(min_length=_WORD, max_length=_WORD)]
    number: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    size: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    """Bytes, without the slot's header."""


Place = TypeVar("Place", bound=SlotPlace)


class Registered(Protocol):
    """The memory of this process that others may read and write."""

    def add(self, buffer: mmap.mmap) -> None:
        """Raises `OSError`."""

    def drop(self, buffer: mmap.mmap) -> None: ...


class Reader(Protocol):
    """Reads and writes the memory of one producer. Each call returns when it is done, and raises `SourceLost`."""

    @property
    def name(self) -> str:
        """What errors call the producer."""

    def read(self, to: int, at: int, size: int) -> None:
        """Copy `size` bytes from the producer's address `at` to the address `to` here."""

    def write(self, at: int, to: int, size: int) -> None:
        """Copy `size` bytes from the address `at` here to the producer's address `to`."""

    def close(self) -> None:
        """Forget the producer."""


def address_of(buffer: mmap.mmap) -> int:
    """Return the address of a buffer's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@dataclass(frozen=True, slots=True)
class _Slot:
    number: int
    unit: int
    """The first of its units of `_HEADER` bytes."""
    units: int
    size: int
    request_id: str


class Slots(Generic[Place]):
    """The payloads that one worker offers, in memory that others read. Thread-safe."""

    def __init__(self, memory: Registered, place: Callable[[int, bytes, int, int], Place], max_bytes: int) -> None:
        """`place` makes what travels as metadata, of the fields of `SlotPlace`, in order."""
        whole = -(-(max_bytes + 2 * _HEADER) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.pool_id = os.urandom(_WORD)
        self._memory = memory
        self._buffer = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.add(self._buffer)
        self._start = address_of(self._buffer)
        self._place = place
        self._words = memoryview(self._buffer).cast("Q")
        self._intervals = Intervals(whole // _HEADER)
        self._lock = threading.Lock()
        self._live: OrderedDict[int, _Slot] = OrderedDict()
        self._requests: dict[str, set[int]] = {}
        self._last = 0

    def offer(self, request_id: str, encoded: Encoded) -> Place | None:
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
        return self._place(self._start + at, self.pool_id, slot.number, slot.size)

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


class SlotSource:
    """A `Source` of the slots of one producer."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._used = time.monotonic()

    @property
    def name(self) -> str:
        return self._reader.name

    def fetch(self, place: SlotPlace, buffers: Buffers) -> Taken | Gone:
        self._used = time.monotonic()
        whole = _HEADER + place.size
        buffer = buffers.take(whole)
        at = address_of(buffer)
        for count in (whole, _HEADER):  # the header again: it was this payload's all the time
            try:
                self._reader.read(at, place.address, count)
            except SourceLost:
                buffers.set_aside(buffer)
                raise
            if not _holds(buffer, place):
                buffers.give(buffer)
                return Gone("its request was released, or it was taken before")
        mark = 2 * _WORD
        buffer[mark : mark + _WORD] = place.number.to_bytes(_WORD, "little")
        with suppress(SourceLost):  # if nothing arrives of this, the slot is freed with its request
            self._reader.write(at + mark, place.address + mark, _WORD)
        with buffers.filling(buffer):
            return Taken(read_from(memoryview(buffer)[_HEADER:whole]), place.size, buffer)

    def hung_up(self) -> bool:
        return time.monotonic() - self._used > IDLE_SECONDS

    def interrupt(self) -> None:
        """One-sided reads cannot be interrupted; they end by themselves."""

    def close(self) -> None:
        self._reader.close()


def _holds(buffer: mmap.mmap, place: SlotPlace) -> bool:
    """Whether a slot's header says that its payload is the one looked for, and nobody has taken it."""
    number = int.from_bytes(buffer[_WORD : 2 * _WORD], "little")
    taken = int.from_bytes(buffer[2 * _WORD : 3 * _WORD], "little")
    return buffer[:_WORD] == place.pool and number == place.number != taken
