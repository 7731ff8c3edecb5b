"""One piece of memory for the intermediate results of a recording: those that do not live at once share a place."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

ALIGNED = 64
"""Bytes."""


@dataclass(slots=True, eq=False)
class Place:
    """The memory of one intermediate result."""

    base: int
    """Where it was while the function was recorded."""
    size: int
    storage: StorageWeakRef
    first: int = -1
    last: int = -1
    """Entries of the recording that touch it; -1: none."""
    kept: torch.Tensor | None = None
    """It stays where it is, held by this."""
    offset: int = -1
    """In the arena, in bytes; -1: it has none there."""


class Places:
    """Those of a recording, found by address while they are in use."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._by_base: dict[int, Place] = {}
        self.all: list[Place] = []

    def add(self, tensor: torch.Tensor) -> None:
        """The tensor is new: what was there before it is no longer in use."""
        storage = tensor.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        first = max(0, bisect.bisect_right(self._bases, base) - 1)
        last = bisect.bisect_left(self._bases, base + size)
        kept = [other for other in self._bases[first:last] if other + self._by_base[other].size <= base]
        for other in set(self._bases[first:last]).difference(kept):
            del self._by_base[other]
        self._bases[first:last] = [*kept, base]
        place = self._by_base[base] = Place(base, size, StorageWeakRef(storage))
        self.all.append(place)

    def of(self, address: int) -> Place | None:
        """The place in use that has this address, if any."""
        index = bisect.bisect_right(self._bases, address) - 1
        place = self._by_base[self._bases[index]] if index >= 0 else None
        if place is None or address >= place.base + place.size or place.storage.expired():
            return None
        return place


def arrange(places: Sequence[Place]) -> int:
    """Give each place that an entry touches, and that is not kept where it is, an offset; the bytes of the arena."""
    living: list[tuple[int, int, int]] = []
    """(offset, size, last entry), by offset."""
    most = 0
    for place in sorted(places, key=lambda place: place.first):
        if place.first < 0 or place.kept is not None:
            continue
        living = [other for other in living if other[2] >= place.first]
        size, offset = -(-place.size // ALIGNED) * ALIGNED, 0
        for begin, length, _ in living:
            if begin - offset >= size:
                break
            offset = max(offset, begin + length)
        bisect.insort(living, (offset, size, place.last))
        place.offset = offset
        most = max(most, offset + size)
    return most
