"""State slots of running sequences, and snapshots of states at block boundaries: the prefix cache of decoders with
recurrent state.

Keys and values of a prefix exist for each of its blocks; a state covers the whole prefix and has the same size at every
boundary, so it is kept at few of them (`places`). A snapshot is a slot of the state store on which no sequence runs:

    free ──reserve──▶ held by a run ──publish──▶ kept (LRU)    under the hash of the last block before it
     ▲                     │                      │
     ╰────────give─────────╯      ╭──discard──────┤
     ╰────────────────────────────╯──evicted by reserve

An admitted sequence copies the snapshot to its own slot. All such copies are made before its first step writes
anything, so a snapshot may be evicted as soon as the copy is requested, and its references are not counted.

Each running sequence of a decoder with state has one slot (`StateSlots`). A slot is free or has one owner; a fork gets
its own, with a copy. Copies are collected and made before the next step. All sources are read before any target is
written, so a slot may be given back and taken again in between.

Optional reading: only decoders with recurrent states have them; the scheduler asks `places` at which tokens a run keeps
one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from segue.engines.autoregressive.schedule.decision import ScheduledSequence, ScheduledTokens

SPARE = 1
"""Slots beyond the sequences: the beams of a search exist before the sequence that they replace is removed."""


class StateSlots:
    """Tracks the owners of state slots and the copies to make between slots."""

    def __init__(self, sequences: int) -> None:
        """`sequences`: the most at once."""
        self.total = sequences + SPARE
        self._free = list(range(self.total - 1, -1, -1))
        self._copies: dict[int, int] = {}
        """Target → source, with source contents as they are before the first copy."""

    @property
    def available(self) -> int:
        """Number of sequences that can get a slot."""
        return max(0, len(self._free) - SPARE)

    def take(self) -> int:
        """Take a slot; its contents are undefined."""
        assert self._free, "no state slot is free"
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Return the slot of a removed sequence."""
        assert slot not in self._free, f"slot {slot} is given back twice"
        self._copies.pop(slot, None)
        self._free.append(slot)

    def copy(self, source: int, target: int) -> None:
        """Request a copy of `source` to `target`."""
        self._copies[target] = self._copies.get(source, source)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return and clear the copies to make now, as (source, target)."""
        copies = [(source, target) for target, source in self._copies.items() if source != target]
        self._copies.clear()
        return copies

    def audit(self, owned: Iterable[int]) -> None:
        """Check the state against the owners' slots."""
        slots = list(owned)
        assert len(set(slots)) == len(slots), f"sequences share a state slot: {sorted(slots)}"
        assert not set(slots) & set(self._free), "a slot is owned and free"
        assert len(slots) + len(self._free) == self.total, "state slots are lost"


_MOST = 4
"""Most boundaries at which one run keeps its state: each takes a call of every mixer."""
_MET = 1 << 16
"""Number of hashes of computed blocks that are remembered."""


def places(sequence: ScheduledSequence, start: int, stop: int, wanted: int, block_size: int) -> tuple[int, ...]:
    """Boundaries at which states are kept while tokens [start, stop) of a sequence are computed: the last one in each
    prefill chunk, the last one that an equal prompt could continue from, the end of each generated block, and the one
    where others are known to share the prefix (`wanted`). None for beams, whose tokens are exchanged."""
    if sequence.beam_group:
        return ()
    borders = {wanted, stop // block_size * block_size}
    if stop >= sequence.length:
        borders.add((stop - 1) // block_size * block_size)
    # the hash of one more block may be known when the step completes
    reach = min(stop, (len(sequence.hashes) + 1) * block_size)
    return tuple(sorted(place for place in borders if start < place <= reach))


def keep_for(run: ScheduledTokens, border: int) -> ScheduledTokens:
    """A decided but undispatched run, changed to keep its state at this boundary for another sequence too, if it passes
    the boundary and does not keep too many already."""
    if not run.start < border <= run.stop or border in run.keep or len(run.keep) >= _MOST:
        return run
    return replace(run, keep=tuple(sorted([*run.keep, border])))


class Snapshots:
    """Tracks which prefixes have a state, and in which slot."""

    def __init__(self, first: int, count: int) -> None:
        """Uses slots [first, first + count) of the store."""
        self.total = count
        self._slots = range(first, first + count)
        self._free = list(reversed(self._slots))
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._used: set[bytes] = set()
        self._met: OrderedDict[bytes, None] = OrderedDict()

    @property
    def kept(self) -> int:
        """Number of prefixes with a state."""
        return len(self._kept)

    def longest(self, chain: Sequence[bytes]) -> int:
        """Number of blocks in the longest prefix of a hash chain that has a state."""
        return next((length for length in range(len(chain), 0, -1) if chain[length - 1] in self._kept), 0)

    def met(self, chain: Sequence[bytes]) -> int:
        """How many of its first blocks some sequence is remembered to have computed."""
        return next((length for length in range(len(chain), 0, -1) if chain[length - 1] in self._met), 0)

    def note(self, chain: Iterable[bytes]) -> None:
        """Remember that these blocks have been computed."""
        for key in chain:
            self._met[key] = None
            self._met.move_to_end(key)
        while len(self._met) > _MET:
            self._met.popitem(last=False)

    def has(self, key: bytes) -> bool:
        return key in self._kept

    def use(self, key: bytes) -> int:
        """Return the slot of a prefix that has a state; it must be copied before the next step."""
        self._kept.move_to_end(key)
        self._used.add(key)
        return self._kept[key]

    def reserve(self) -> int | None:
        """Reserve a slot to write a state to, evicting the least recently used prefix if needed. None: all are held."""
        if not self._free and self._kept:
            self.discard(next(iter(self._kept)))
        return self._free.pop() if self._free else None

    def publish(self, key: bytes, slot: int, *, passing: bool = False) -> bool:
        """Keep the state written to a reserved slot for this prefix. False: it had one already, and the slot is freed.
        `passing`: evict it first, so that a long prompt does not evict the states of others."""
        if key in self._kept:
            self._kept.move_to_end(key)
            self.give(slot)
            return False
        self._kept[key] = slot
        self._kept.move_to_end(key, last=not passing)
        return True

    def give(self, slot: int) -> None:
        """Return a reserved slot whose content is not kept."""
        assert slot in self._slots, f"slot {slot} is not a snapshot slot"
        assert slot not in self._free, f"snapshot slot {slot} is given back twice"
        self._free.append(slot)

    def discard(self, key: bytes, *, unused: bool = False) -> None:
        """Discard the state of a prefix, if it has one. `unused`: only if no sequence has continued from it."""
        if key in self._kept and not (unused and key in self._used):
            self._used.discard(key)
            self.give(self._kept.pop(key))

    def audit(self, held: Iterable[int]) -> None:
        """Check the state against the slots that runs hold."""
        owned = [*held, *self._kept.values(), *self._free]
        assert sorted(owned) == list(self._slots), f"snapshot slots are lost or shared: {sorted(owned)}"
        assert self._used <= self._kept.keys(), "a discarded state counts as used"
