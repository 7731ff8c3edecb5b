"""The producer's side of shared memory: a growing set of segments with first-fit allocation, freed by state words.

The memory that counts against `max_bytes` is that of the resident segments. A segment in which nothing is allocated may
be hollowed: its memory goes back to the system, its mapping stays, here and at the receivers, to be filled again later.
So a payload of at most `max_bytes` always fits once enough has been released, after any sequence of other sizes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from segue.connectors.device.memory import Region
from segue.connectors.intervals import Intervals
from segue.connectors.shm.segment import PAGE, RECEIVERS, Segment, put_word

_LOOKS = 16
"""Allocations checked before each new one, so that released memory is reused while it is warm in the cache."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One allocation, from `allocate` until its word is found to be 0."""

    generation: int
    segment: int
    page: int
    pages: int
    request_id: str
    region: Region | None = None
    """Device memory of the payload's tensors; freed with the slot."""


@dataclass(slots=True)
class _Row:
    """A segment with the producer's list of its free pages."""

    segment: Segment
    intervals: Intervals
    resident: bool = True


class Pool:
    """Allocates in segments. Thread-safe: the worker allocates and releases, the hand-over frees after disconnects."""

    def __init__(self, pool_bytes: int, max_bytes: int) -> None:
        """The first segment of `pool_bytes` is allocated and pre-faulted now. Raises OSError if memory is short."""
        self._step = pool_bytes // PAGE
        self._max = max_bytes // PAGE
        self._lock = threading.Lock()
        self._rows: list[_Row] = []
        self._live: OrderedDict[int, Slot] = OrderedDict()
        self._requests: dict[str, set[int]] = {}
        self._generation = 0
        self._add(self._step)

    def fits(self, size: int) -> bool:
        """Whether `size` bytes could ever be allocated."""
        return -(-size // PAGE) <= self._max

    def allocate(self, request_id: str, size: int, region: Region | None = None) -> tuple[Slot, memoryview] | None:
        """Allocate a run of pages in the state "put"; return it and its bytes to write, or None if there is no space.

        `region` is freed with the run; on None, the caller keeps it.
        """
        pages = -(-size // PAGE)
        with self._lock:
            self._look(_LOOKS)
            found = self._find(pages)
            if found is None:
                self._look(len(self._live))
                found = self._find(pages) or self._grow(pages)
            if found is None:
                return None
            index, page = found
            self._generation += 1
            slot = Slot(self._generation, index, page, pages, request_id, region)
            self._live[slot.generation] = slot
            self._requests.setdefault(request_id, set()).add(slot.generation)
            segment = self._rows[index].segment
            swapped = segment.swap(page, 0, put_word(slot.generation))
            assert swapped, "a free page had an owner"
            return slot, segment.view(page, size)

    def release(self, request_id: str) -> None:
        """Free the request's payloads that nobody has taken."""
        with self._lock:
            for generation in list(self._requests.get(request_id, ())):
                self._withdraw(self._live[generation])

    def withdraw(self, generation: int) -> None:
        """Free one allocation if it is still there and nobody has taken it."""
        with self._lock:
            if generation in self._live:
                self._withdraw(self._live[generation])

    def receiver_gone(self, receiver: int) -> None:
        """Free all that `receiver` had taken; its connection has ended, so it no longer reads any of it."""
        with self._lock:
            for slot in list(self._live.values()):
                if self._rows[slot.segment].segment.swap(slot.page, put_word(slot.generation) + receiver, 0):
                    self._reclaim(slot)

    def taken(self, generation: int, receiver: int) -> Slot | None:
        """Return the allocation if `receiver` has taken it and not released it, else None."""
        with self._lock:
            slot = self._live.get(generation)
            if slot is None:
                return None
            word = self._rows[slot.segment].segment.words[slot.page]
            return slot if word == put_word(generation) + receiver else None

    def sweep(self) -> None:
        """Reclaim all released allocations."""
        with self._lock:
            self._look(len(self._live))

    def segment(self, index: int) -> Segment | None:
        """Return the segment that a receiver asks for; None if there is none."""
        with self._lock:
            return self._rows[index].segment if 0 <= index < len(self._rows) else None

    @property
    def bytes_in_use(self) -> int:
        """Bytes of pages that are put or taken."""
        with self._lock:
            self._look(len(self._live))
            return sum(slot.pages for slot in self._live.values()) * PAGE

    @property
    def bytes_resident(self) -> int:
        """Bytes of memory held for pages, in use or not; at most `max_bytes`."""
        with self._lock:
            return self._resident() * PAGE

    def audit(self) -> None:
        """Assert that free intervals and allocations tile every segment, and that the state words agree."""
        with self._lock:
            for index, row in enumerate(self._rows):
                slots = [slot for slot in self._live.values() if slot.segment == index]
                tiles = sorted([(slot.page, slot.page + slot.pages) for slot in slots] + row.intervals.free)
                ends = [0, *(end for _, end in tiles)]
                assert ends == [*(start for start, _ in tiles), row.segment.pages], f"segment {index}: {tiles}"
                assert row.resident or not slots, f"segment {index} is hollow and in use"
                owned = {slot.page: slot.generation for slot in slots}
                for page, word in enumerate(row.segment.words):
                    assert word == 0 or word // RECEIVERS == owned.get(page), f"segment {index} page {page}: {word}"
            assert self._resident() <= self._max
            assert {g for generations in self._requests.values() for g in generations} == set(self._live)

    def close(self) -> None:
        """Close the descriptors; each mapping ends with its last view, on either side."""
        with self._lock:
            for row in self._rows:
                row.segment.close()
            self._rows.clear()
            self._live.clear()
            self._requests.clear()

    def _look(self, count: int) -> None:
        """Reclaim those of the `count` allocations unchecked for longest whose word has become 0."""
        for _ in range(min(count, len(self._live))):
            generation, slot = next(iter(self._live.items()))
            if self._rows[slot.segment].segment.words[slot.page] == 0:
                self._reclaim(slot)
            else:
                self._live.move_to_end(generation)

    def _withdraw(self, slot: Slot) -> None:
        segment = self._rows[slot.segment].segment
        if segment.swap(slot.page, put_word(slot.generation), 0) or segment.words[slot.page] == 0:
            self._reclaim(slot)

    def _reclaim(self, slot: Slot) -> None:
        self._rows[slot.segment].intervals.give(slot.page, slot.pages)
        if slot.region is not None:
            slot.region.give()
        del self._live[slot.generation]
        generations = self._requests[slot.request_id]
        generations.discard(slot.generation)
        if not generations:
            del self._requests[slot.request_id]

    def _find(self, pages: int) -> tuple[int, int] | None:
        for index, row in enumerate(self._rows):
            if row.resident and (page := row.intervals.take(pages)) is not None:
                return index, page
        return None

    def _grow(self, pages: int) -> tuple[int, int] | None:
        """Allocate in a hollow or new segment; hollow empty segments if `max_bytes` requires it."""
        room = self._max - self._resident()
        idle = [row for row in self._rows if row.resident and row.intervals.empty]
        if room + sum(row.segment.pages for row in idle) < pages:
            return None
        while room < pages:
            row = idle.pop()
            row.segment.hollow()
            row.resident = False
            room += row.segment.pages
        for index, row in enumerate(self._rows):
            if not row.resident and pages <= row.segment.pages <= room:
                row.resident = True
                page = row.intervals.take(pages)
                assert page == 0, "a hollow segment is empty"
                return index, page
        try:
            # whole steps keep the number of sizes small, so that hollow segments can be reused
            index = self._add(min(-(-pages // self._step) * self._step, room))
        except OSError:  # the system has no more memory, which the caller sees as a full pool
            return None
        page = self._rows[index].intervals.take(pages)
        assert page == 0, "a new segment is empty"
        return index, page

    def _add(self, pages: int) -> int:
        self._rows.append(_Row(Segment.create(pages), Intervals(pages)))
        return len(self._rows) - 1

    def _resident(self) -> int:
        return sum(row.segment.pages for row in self._rows if row.resident)
