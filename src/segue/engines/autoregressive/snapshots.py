"""States kept at borders of blocks, so that other sequences can go on from them: the prefix cache of decoders that keep
a state.

Keys and values of a prefix are there for each of its blocks; a state is that of the whole prefix, as large at its
first border as at its last, so it is kept at few of them (`places`). A snapshot is a slot of the state store that no
sequence runs on:

    free ──reserve──▶ held by a run ──publish──▶ kept (LRU)    under the hash of the last block before it
     ▲                     │                      │
     ╰────────give─────────╯      ╭──discard──────┤
     ╰────────────────────────────╯──evicted by reserve

A sequence that is admitted copies the snapshot to its own slot. The copy is made before the step in which it begins,
all such copies before anything is written: so a snapshot may be evicted as soon as the copy is asked for, and no
references to it are counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from segue.engines.autoregressive.jobs import Job, Run

_MOST = 4
"""Borders at which one run keeps its state: each takes a call of every mixer."""
_MET = 1 << 16
"""Hashes of computed blocks that are remembered."""


def places(job: Job, start: int, stop: int, wanted: int, block_size: int) -> tuple[int, ...]:
    """Where states are kept while tokens [start, stop) of a sequence are computed: at the last border in each chunk of
    a prefill, at the last one that an equal prompt could go on from, at the end of each block that is generated, and
    where others are known to have begun alike (`wanted`). None of beams, whose tokens are exchanged."""
    if job.gang:
        return ()
    borders = {wanted, stop // block_size * block_size}
    if stop >= job.length:
        borders.add((stop - 1) // block_size * block_size)
    # the hash of one block more may be known when the step has landed
    reach = min(stop, (len(job.hashes) + 1) * block_size)
    return tuple(sorted(place for place in borders if start < place <= reach))


def keep_for(run: Run, border: int) -> Run:
    """A run that is decided and not launched, which keeps its state at this border for another sequence, too, where it
    comes past it and does not keep many already."""
    if not run.start < border <= run.stop or border in run.keep or len(run.keep) >= _MOST:
        return run
    return replace(run, keep=tuple(sorted([*run.keep, border])))


class Snapshots:
    """Which prefixes have a state, and in which slot."""

    def __init__(self, first: int, count: int) -> None:
        """For slots [first, first + count) of the store."""
        self.total = count
        self._slots = range(first, first + count)
        self._free = list(reversed(self._slots))
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._used: set[bytes] = set()
        self._met: OrderedDict[bytes, None] = OrderedDict()

    @property
    def kept(self) -> int:
        """How many prefixes have a state."""
        return len(self._kept)

    def longest(self, chain: Sequence[bytes]) -> int:
        """How many blocks the longest prefix of a hash chain has that has a state."""
        return next((length for length in range(len(chain), 0, -1) if chain[length - 1] in self._kept), 0)

    def met(self, chain: Sequence[bytes]) -> int:
        """How many of its first blocks some sequence has computed already, as far as is remembered."""
        return next((length for length in range(len(chain), 0, -1) if chain[length - 1] in self._met), 0)

    def note(self, chain: Iterable[bytes]) -> None:
        """These blocks have been computed."""
        for key in chain:
            self._met[key] = None
            self._met.move_to_end(key)
        while len(self._met) > _MET:
            self._met.popitem(last=False)

    def has(self, key: bytes) -> bool:
        return key in self._kept

    def use(self, key: bytes) -> int:
        """The slot of a prefix that has one: to be copied before the next step."""
        self._kept.move_to_end(key)
        self._used.add(key)
        return self._kept[key]

    def reserve(self) -> int | None:
        """A slot to write a state to, at worst that of the prefix that was used least recently. None: all are held."""
        if not self._free and self._kept:
            self.discard(next(iter(self._kept)))
        return self._free.pop() if self._free else None

    def publish(self, key: bytes, slot: int, *, passing: bool = False) -> bool:
        """What was written to a reserved slot is the state of this prefix. False: it had one, and the slot is free.
        `passing`: it is kept while there is room, and goes first, so that a long prompt leaves others theirs."""
        if key in self._kept:
            self._kept.move_to_end(key)
            self.give(slot)
            return False
        self._kept[key] = slot
        self._kept.move_to_end(key, last=not passing)
        return True

    def give(self, slot: int) -> None:
        """Nothing of use was written to a reserved slot."""
        assert slot in self._slots, f"slot {slot} is of no snapshot"
        assert slot not in self._free, f"snapshot slot {slot} is given back twice"
        self._free.append(slot)

    def discard(self, key: bytes, *, unused: bool = False) -> None:
        """Forget the state of a prefix, where it has one. `unused`: only if nobody has gone on from it."""
        if key in self._kept and not (unused and key in self._used):
            self._used.discard(key)
            self.give(self._kept.pop(key))

    def audit(self, held: Iterable[int]) -> None:
        """Check the books against the slots that runs hold."""
        owned = [*held, *self._kept.values(), *self._free]
        assert sorted(owned) == list(self._slots), f"snapshot slots are lost or shared: {sorted(owned)}"
        assert self._used <= self._kept.keys(), "a state that is gone counts as used"
