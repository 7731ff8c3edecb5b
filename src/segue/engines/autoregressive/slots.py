"""The slots of a state store: each running sequence of a decoder that keeps states has one.

A slot is free or has one owner; a fork gets one of its own, with a copy. Copies are collected and made before the next
step, all sources read before any target is written, so a slot may be given back and taken again in between.
"""

from __future__ import annotations

from collections.abc import Iterable

SPARE = 1
"""Slots beyond the sequences: the beams of a search are there before the sequence they come from goes."""


class StateSlots:
    """Who has a slot, and what is to be copied."""

    def __init__(self, sequences: int) -> None:
        """For so many sequences at once."""
        self.total = sequences + SPARE
        self._free = list(range(self.total - 1, -1, -1))
        self._copies: dict[int, int] = {}
        """Target → source, as the sources are before the first copy is made."""

    @property
    def available(self) -> int:
        """Sequences that can get a slot."""
        return max(0, len(self._free) - SPARE)

    def take(self) -> int:
        """A slot, with whatever is in it."""
        assert self._free, "no state slot is free"
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Its owner is gone."""
        assert slot not in self._free, f"slot {slot} is given back twice"
        self._copies.pop(slot, None)
        self._free.append(slot)

    def copy(self, source: int, target: int) -> None:
        """What is in `source` is to be in `target`, too."""
        self._copies[target] = self._copies.get(source, source)

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies to make now, (source, target) each."""
        copies = [(source, target) for target, source in self._copies.items() if source != target]
        self._copies.clear()
        return copies

    def audit(self, owned: Iterable[int]) -> None:
        """Check the books against the owners' slots."""
        slots = list(owned)
        assert len(set(slots)) == len(slots), f"sequences share a state slot: {sorted(slots)}"
        assert not set(slots) & set(self._free), "a slot is owned and free"
        assert len(slots) + len(self._free) == self.total, "state slots are lost"
