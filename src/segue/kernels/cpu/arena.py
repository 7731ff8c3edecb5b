"""Memory planning for a recording: intermediate results share one arena, and reuse memory when not live together."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

ALIGNED = 64
"""Alignment of regions in bytes."""


@dataclass(slots=True, eq=False)
class Region:
    """The memory of one intermediate result."""

    base: int
    """Its address while the function was recorded."""
    size: int
    storage: StorageWeakRef
    first: int = -1
    last: int = -1
    """First and last entry of the recording that touch it; -1: none."""
    kept: torch.Tensor | None = None
    """Set if it stays at its recorded address; this tensor keeps it alive."""
    offset: int = -1
    """Offset in the arena in bytes; -1: it is not in the arena."""


class Places:
    """The regions of a recording, found by address while they are in use."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._by_base: dict[int, Region] = {}
        self.all: list[Region] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Add a new tensor's memory; regions that it overlaps are no longer in use."""
        storage = tensor.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        first = max(0, bisect.bisect_right(self._bases, base) - 1)
        last = bisect.bisect_left(self._bases, base + size)
        kept = [other for other in self._bases[first:last] if other + self._by_base[other].size <= base]
        for other in set(self._bases[first:last]).difference(kept):
            del self._by_base[other]
        self._bases[first:last] = [*kept, base]
        place = self._by_base[base] = Region(base, size, StorageWeakRef(storage))
        self.all.append(place)

    def of(self, address: int) -> Region | None:
        """The region in use that contains this address, if any."""
        index = bisect.bisect_right(self._bases, address) - 1
        place = self._by_base[self._bases[index]] if index >= 0 else None
        if place is None or address >= place.base + place.size or place.storage.expired():
            return None
        return place


def arrange(places: Sequence[Region]) -> int:
    """Assign an arena offset to each touched region that is not kept in place; return the bytes of the arena."""
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
