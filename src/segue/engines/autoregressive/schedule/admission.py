"""Admits waiting sequences to a step that is being decided. Pure, as `schedule` is.

In the order of admission, each waiting sequence is looked up in the prefix cache (`Prefix`), and then

- skipped, if a running one computes its next block in this step: equal prompts are computed once. It keeps a claim to
  its other blocks.
- admitted, if all blocks of its prompt fit in addition to those that others will still need. Sequences that hold for
  more input, and then paused ones, are preempted for it.

The first one that does not fit ends the admission: smaller ones behind it never overtake it forever."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import chain

from segue.engines.autoregressive.cache.blocks import BlockPool, common, find_hit, visible
from segue.engines.autoregressive.cache.states import Snapshots, keep_for, places
from segue.engines.autoregressive.schedule.bidirectional import around, fitting, whole
from segue.engines.autoregressive.schedule.decision import Ledger, Limits, ScheduledSequence, ScheduledTokens, missing
from segue.engines.autoregressive.schedule.policies import Accounts

_ENOUGH = sys.maxsize


@dataclass(frozen=True, slots=True)
class Prefix:
    """What exists of a waiting sequence's prompt."""

    chain: Seq[bytes]
    """Hashes of the blocks that may be taken from others."""
    length: int
    """Blocks that are cached."""
    hit: tuple[tuple[int, ...], ...]
    """These blocks, per group: the visible ones."""
    coming: int
    """Blocks that will exist after the runs that now compute block `length`; `length` if there is no such run."""
    alike: int
    """As `coming`, but also blocks at whose end no state will be kept; equal to it for decoders without state."""

    @property
    def found(self) -> list[int]:
        """The cached blocks, over all groups."""
        return [block for blocks in self.hit for block in blocks]


@dataclass(slots=True)
class Admission:
    """What is left of a step for waiting sequences, and the rules by which they get it."""

    ledger: Ledger
    limits: Limits
    pool: BlockPool
    snapshots: Snapshots | None
    in_flight: Seq[ScheduledTokens]
    runs: list[ScheduledTokens]
    """Of running sequences. If states are reused, they are changed to keep the states that waiting sequences need."""
    tokens: int
    room: int
    """Sequences that the step can still take."""
    slots: int
    """Free slots for states, less those reserved for forks."""
    promised: int
    """Blocks that running prefills, and skipped sequences, will still need: not available to others."""
    idle: list[ScheduledSequence]
    """Running sequences that may be preempted, the last first."""
    stuck: list[ScheduledSequence] = field(default_factory=list)
    """Running sequences that do not run in this step: those that are lent may preempt them, too, the last first."""
    admitted: list[ScheduledTokens] = field(default_factory=list)
    preempted: list[ScheduledSequence] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return self.tokens <= 0 or self.room <= 0

    def look_up(self, sequence: ScheduledSequence) -> Prefix:
        """Find a sequence's prompt in the cache, and in the runs of this step and of the one in flight."""
        # at least one token is always computed, because the logits of the last one are needed
        chain = [] if sequence.fresh else sequence.hashes[: (sequence.ready - 1) // self.limits.block_size]
        length, hit = _hit(sequence, chain, self.pool, self.limits, self.snapshots)
        alike = _in_flight(sequence, chain, length, [*self.in_flight, *self.runs, *self.admitted], self.limits)
        coming = alike
        if self.snapshots is not None and alike > length:
            coming = _kept(sequence, chain, length, self.in_flight, (self.runs, self.admitted), self.limits)
        return Prefix(chain, length, hit, coming, alike)

    def skip(self, sequence: ScheduledSequence, prefix: Prefix) -> bool:
        """Let a sequence wait for the blocks that are coming, with a claim to the others. False if these do not fit."""
        needed = missing(self.limits, sequence, visible(self.limits.windows, prefix.coming, self.limits.block_size))
        if needed + self.promised > self.ledger.available and not self.idle:
            return False
        self.promised += needed
        self.room -= sequence.width
        return True

    def admit(self, sequence: ScheduledSequence, prefix: Prefix) -> bool:
        """Admit a sequence with as many tokens as fit. False, and nothing but preemptions, if its prompt does not."""
        self._preempt_for(sequence, prefix)
        if not self._fits(sequence, prefix):
            return False
        limits, start = self.limits, prefix.length * self.limits.block_size
        spare = self._spare(prefix) // len(limits.windows)
        tokens = whole(sequence.spans, start, min(sequence.ready - start, self.tokens))
        tokens = fitting(sequence.spans, start, min(tokens, (prefix.length + spare) * limits.block_size - start))
        new = limits.blocks(start + tokens) - prefix.length
        self.ledger.share(prefix.found)
        self.ledger.take(len(limits.windows) * new)
        self.promised += missing(limits, sequence, [len(blocks) + new for blocks in prefix.hit])
        self.tokens -= tokens
        self.room -= sequence.width
        self.slots -= sequence.width
        self.admitted.append(self._with_states(ScheduledTokens(sequence, start, tokens, new, prefix.hit), prefix))
        return True

    def _fits(self, sequence: ScheduledSequence, prefix: Prefix) -> bool:
        needed = missing(self.limits, sequence, [len(blocks) for blocks in prefix.hit])
        return needed <= self._spare(prefix) and sequence.width <= self.slots

    def _spare(self, prefix: Prefix) -> int:
        """Blocks that are free for a sequence besides the cached ones, which it shares."""
        return self.ledger.available - self.ledger.unused(prefix.found) - self.promised

    def _preempt_for(self, sequence: ScheduledSequence, prefix: Prefix) -> None:
        """Preempt idle sequences until this one fits, or none is left."""
        if sequence.lent:
            self.idle, self.stuck = self.stuck + self.idle, []
        while self.idle and not self._fits(sequence, prefix):
            victims = self.idle.pop().together
            self.slots += sum(victim.width for victim in victims)
            self.idle = [other for other in self.idle if other not in victims]
            self.preempted += victims
            for victim in victims:
                self.ledger.drop(victim.blocks)

    def _with_states(self, run: ScheduledTokens, prefix: Prefix) -> ScheduledTokens:
        """The run, with the places at which it keeps its state for sequences of the same prefix."""
        if self.snapshots is None:
            return run
        wanted = max(prefix.alike, self.snapshots.met(prefix.chain)) * self.limits.block_size
        keep = places(run.sequence, run.start, run.stop, wanted, self.limits.block_size)
        return replace(run, wanted=wanted, keep=keep)


def admit_waiting(admission: Admission, waiting: Seq[ScheduledSequence], accounts: Accounts | None) -> None:
    """Admit waiting sequences by rank, or in fair shares between tenants (`accounts`); before them those that are lent,
    whose blocks are reserved."""
    last: ScheduledSequence | None = None  # admitted last
    order = waiting if accounts is None else accounts.order(waiting, lambda sequence: sequence is last)
    lent = [sequence for sequence in waiting if sequence.lent]
    for sequence in chain(lent, (sequence for sequence in order if not sequence.lent)):
        if admission.full:
            return
        if not sequence.runnable:
            continue
        if sequence.width > admission.room:
            return
        prefix = admission.look_up(sequence)
        if prefix.coming > prefix.length:
            if not admission.skip(sequence, prefix):
                return
        elif admission.admit(sequence, prefix):
            last = sequence
        else:
            return


def admission_of(
    running: Seq[ScheduledSequence],
    runs: list[ScheduledTokens],
    ledger: Ledger,
    limits: Limits,
    pool: BlockPool,
    in_flight: Seq[ScheduledTokens],
    slots: int | None,
    snapshots: Snapshots | None,
) -> Admission:
    """What a step has left after the runs of running sequences. Arguments as of `schedule`."""
    prefill = limits.prefill(any(run.sequence.decoding for run in runs))
    prefill -= sum(run.tokens for run in runs if not run.sequence.decoding)
    planned = {id(run.sequence): run.allocate for run in runs}
    return Admission(
        ledger,
        limits,
        pool,
        snapshots,
        in_flight,
        runs,
        tokens=min(limits.max_tokens - sum(run.tokens for run in runs), prefill),
        room=limits.max_batch
        - sum(sequence.width for sequence in running if not (sequence.paused or sequence.holding)),
        # a running sequence holds a slot and reserves the slots of its forks
        slots=_ENOUGH if slots is None else slots - sum(sequence.width - 1 for sequence in running),
        promised=sum(
            missing(limits, sequence, [len(table.blocks) + planned.get(id(sequence), 0) for table in sequence.tables])
            for sequence in running
            if not (sequence.paused or sequence.holding)
        ),
        idle=sorted(
            (
                sequence
                for sequence in running
                if (sequence.paused or sequence.holding) and sequence.tables and not sequence.lent
            ),
            key=lambda sequence: sequence.holding,
        ),
        stuck=[
            sequence
            for sequence in running
            if sequence.tables and not (sequence.paused or sequence.holding or sequence.lent or id(sequence) in planned)
        ],
    )


def _hit(
    sequence: ScheduledSequence, chain: Seq[bytes], pool: BlockPool, limits: Limits, snapshots: Snapshots | None
) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """`find_hit`, limited to prefixes that have a state, if one is needed, and that split no span."""
    while True:
        length, hit = find_hit(pool, chain, limits.windows, limits.block_size)
        usable = _uncut(sequence, length, limits)
        if snapshots is not None:
            usable = snapshots.longest(chain[:usable])
        if usable == length:
            return length, hit
        chain = chain[:usable]


def _uncut(sequence: ScheduledSequence, length: int, limits: Limits) -> int:
    """How many of its first `length` blocks it can continue from without splitting a span."""
    place = length * limits.block_size
    while (before := around(sequence.bidirectional, place)[0]) < place:
        place = before // limits.block_size * limits.block_size
    return place // limits.block_size


def _in_flight(
    sequence: ScheduledSequence, chain: Seq[bytes], length: int, runs: Seq[ScheduledTokens], limits: Limits
) -> int:
    """How many blocks of its chain will exist after the runs that now compute block `length` of it.

    It waits only for sequences of higher rank that run in this step or in the step in flight: they make progress, so
    the wait ends. A sequence that is paused, preempted or passed over is not in `runs`; its block is then computed a
    second time.
    """
    return max((blocks for _, blocks in _alike(sequence, chain, length, runs, limits)), default=length)


def _alike(
    sequence: ScheduledSequence, chain: Seq[bytes], length: int, runs: Seq[ScheduledTokens], limits: Limits
) -> Iterator[tuple[int, int]]:
    """Indices of the runs that now compute block `length` of its chain, and how many blocks of the chain each will
    have."""
    if length == len(chain):
        return
    for place, run in enumerate(runs):
        theirs = run.sequence.hashes
        ahead = run.start < (length + 1) * limits.block_size <= len(theirs) * limits.block_size
        if ahead and run.sequence.rank < sequence.rank and theirs[length] == chain[length]:
            yield place, _uncut(sequence, common(theirs, chain), limits)


def _kept(
    sequence: ScheduledSequence,
    chain: Seq[bytes],
    length: int,
    in_flight: Seq[ScheduledTokens],
    deciding: Seq[list[ScheduledTokens]],
    limits: Limits,
) -> int:
    """`_in_flight`, limited to kept states. Runs not yet dispatched are changed to keep theirs at the common prefix."""
    size = limits.block_size
    borders = [length * size]
    for place, blocks in _alike(sequence, chain, length, in_flight, limits):
        borders += [border for border in in_flight[place].sequence.held if border <= blocks * size]
    for runs in deciding:
        for place, blocks in _alike(sequence, chain, length, runs, limits):
            runs[place] = keep_for(runs[place], blocks * size)
            borders += [border for border in runs[place].keep if border <= blocks * size]
    return max(borders) // size
