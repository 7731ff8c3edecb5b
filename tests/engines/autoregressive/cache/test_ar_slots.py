"""State slots: none is shared or lost, and a copy is a copy of what its source was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.engines.autoregressive.cache.states import StateSlots


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), max_size=80))
def test_every_owner_finds_its_own(sequences: int, actions: list[tuple[int, int, int]]) -> None:
    slots = StateSlots(sequences)
    kept = [-1] * slots.total
    """What the memory holds."""
    owners: dict[int, int] = {}
    """By slot, what its owner must find there."""
    for number, (action, one, other) in enumerate(actions):
        held = sorted(owners)
        match action:
            case 0 if slots.available:  # a sequence begins: it writes before it reads
                slot = slots.take()
                assert slot not in owners
                _step(slots, kept, owners)
                owners[slot] = kept[slot] = number
            case 1 if held:
                gone = held[one % len(held)]
                del owners[gone]
                slots.give(gone)
            case 2 if held and len(held) < slots.total:  # the spare slot is for forks
                source = held[one % len(held)]
                slot = slots.take()
                slots.copy(source, slot)
                owners[slot] = owners[source]
            case 3 if held:
                source, target = held[one % len(held)], held[other % len(held)]
                slots.copy(source, target)
                owners[target] = owners[source]
            case 4:
                _step(slots, kept, owners)
                for slot in held[:one]:  # all that run in a step change their states
                    owners[slot] = kept[slot] = number
            case _:
                pass
        slots.audit(owners)
        assert slots.available == max(0, sequences - len(owners))
    _step(slots, kept, owners)


def _step(slots: StateSlots, kept: list[int], owners: dict[int, int]) -> None:
    copies = slots.take_copies()
    assert len({target for _, target in copies}) == len(copies)
    before = kept[:]
    for source, target in copies:
        kept[target] = before[source]
    assert {slot: kept[slot] for slot in owners} == owners
    assert slots.take_copies() == []


def test_a_slot_is_given_back_once() -> None:
    slots = StateSlots(2)
    slot = slots.take()
    slots.give(slot)
    with pytest.raises(AssertionError, match="given back twice"):
        slots.give(slot)
