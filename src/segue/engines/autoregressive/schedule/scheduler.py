"""The queues of a stage and the ledger of its blocks. `schedule` decides; `Scheduler` carries the decision out."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from segue.engines.autoregressive.cache.blocks import BlockPool, first_visible, group_key
from segue.engines.autoregressive.cache.states import Snapshots, StateSlots
from segue.engines.autoregressive.schedule.decision import Decision, Limits, ScheduledSequence, ScheduledTokens, Table
from segue.engines.autoregressive.schedule.policies import Accounts, Rank
from segue.engines.autoregressive.schedule.schedule import schedule


class Scheduler:
    """Owns the two queues, the pool and the accounts, and applies each `Decision` to them."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        accounts: Accounts | None = None,
        slots: StateSlots | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """`slots`: for a decoder with state; `snapshots`: if states of prefixes are kept for reuse."""
        self.pool = pool
        self.limits = limits
        self.accounts = accounts
        self.slots = slots
        self.snapshots = snapshots
        self.running: list[ScheduledSequence] = []
        self.waiting: list[ScheduledSequence] = []
        self.removed: list[ScheduledSequence] = []
        """Finished sequences whose blocks a step in flight still writes to."""
        self.preemptions = 0
        self.expired = 0
        """Sequences whose blocks were given back because they held for too long."""
        self.query_tokens = 0
        self.hit_tokens = 0

    def add(self, sequence: ScheduledSequence) -> None:
        insort(self.waiting, sequence, key=_rank)

    def next(self, in_flight: Seq[ScheduledTokens] = ()) -> Decision:
        """Decide the next step. `in_flight`: runs of the step in flight, which count as computed (`expect`)."""
        if self.accounts is not None:
            self.accounts.notice(self.waiting, self.running)
        slots = None if self.slots is None else self.slots.available
        return schedule(
            self.running, self.waiting, self.pool, self.limits, self.accounts, in_flight, slots, self.snapshots
        )

    def expect(self, run: ScheduledTokens) -> None:
        """Count a dispatched run as computed before it completes."""
        run.sequence.computed = run.stop

    def recall(self, run: ScheduledTokens) -> None:
        """Undo `expect`."""
        run.sequence.computed = run.start

    def dispatched(self, runs: Seq[ScheduledTokens]) -> None:
        """Mark the runs as dispatched: until they complete, the blocks they write to stay theirs."""
        for run in runs:
            run.sequence.dispatched = run.stop

    def completed(self, runs: Iterable[ScheduledTokens]) -> None:
        """Mark the runs as complete. Blocks of removed sequences stay readable until `settle`."""
        for run in runs:
            if run.sequence.dispatched == run.stop:  # otherwise a later step computes it
                run.sequence.dispatched = 0

    def settle(self) -> None:
        """Free the blocks of removed sequences that are in no step in flight any more."""
        for sequence in self.removed:
            if not sequence.dispatched:
                self._release(sequence)
        self.removed = [sequence for sequence in self.removed if sequence.dispatched]

    def apply(self, decision: Decision) -> list[tuple[int, int]]:
        """Preempt, then share cached blocks, then allocate: sharing first keeps hits from being evicted.

        Returns the copies to make before the step, as (from block, to block). A block may be in two of them: read all
        sources before writing any.
        """
        for sequence in decision.preempt:
            assert not sequence.dispatched, f"{sequence.key} is preempted while it is computed"
            self.restart(sequence)
            self.preemptions += 1
        for run in decision.runs:
            if not run.sequence.running:
                length = run.start // self.limits.block_size
                for blocks in run.hit:
                    self.pool.share(blocks)
                run.sequence.tables = [Table(length - len(blocks), list(blocks)) for blocks in run.hit]
                run.sequence.computed = run.start
                run.sequence.running = True
                if self.slots is not None:
                    run.sequence.slot = self.slots.take()
                    if self.snapshots is not None and length:
                        self.slots.copy(self.snapshots.use(run.sequence.hashes[length - 1]), run.sequence.slot)
                run.sequence.wanted = run.wanted
                if self.accounts is not None:
                    self.accounts.admit(run.sequence)
                self.query_tokens += run.sequence.length
                self.hit_tokens += run.start
                self.waiting.remove(run.sequence)
                insort(self.running, run.sequence, key=_rank)
        copies = []
        for run in decision.runs:
            self._hold_before_drafts(run)
        for run in decision.runs:
            self._hold(run)
            if run.copy:
                for table, tail in zip(run.sequence.tables, self.limits.tails(run.sequence), strict=True):
                    self.pool.release([tail])
                    [fresh] = self.pool.allocate(1)
                    table.blocks[run.start // self.limits.block_size - table.first] = fresh
                    copies.append((tail, fresh))
            if run.allocate:
                for table in run.sequence.tables:
                    last = table.blocks[-1] if table.blocks else None
                    table.blocks += self.pool.allocate(run.allocate, last)
        return copies

    def _hold_before_drafts(self, run: ScheduledTokens) -> None:
        """Reserve a slot for the recurrent state before the drafts, to restore it if one is rejected. Call this before
        `_hold`, which may take the last slot."""
        if run.drafts and self.snapshots is not None:
            place = run.stop - run.drafts
            slot = self.snapshots.reserve()
            assert slot is not None, "drafts without a free slot for the state before them"
            run.sequence.held[place] = slot
            run.sequence.drafted = (place, run.stop)

    def _hold(self, run: ScheduledTokens) -> None:
        """Reserve slots for the states that the run keeps, if slots are free and the state is not kept already."""
        for place in run.keep:
            if place in run.sequence.held:
                continue
            assert self.snapshots is not None
            index = place // self.limits.block_size - 1
            known = index < len(run.sequence.hashes) and self.snapshots.has(run.sequence.hashes[index])
            slot = None if known else self.snapshots.reserve()
            if slot is not None:
                run.sequence.held[place] = slot

    def _keep(self, snapshots: Snapshots, sequence: ScheduledSequence, computed: int, *, publish: bool) -> None:
        """Publish the states computed by now."""
        size = self.limits.block_size
        for place in sorted(sequence.held):
            if computed < place <= sequence.dispatched:
                continue  # a step in flight writes it
            slot, index = sequence.held.pop(place), place // size - 1
            if place % size or place > computed or not publish or index >= len(sequence.hashes):
                snapshots.give(slot)
                continue
            # a state after a prompt chunk: no sequence is known to need it
            passing = computed < sequence.length - 1 and place != sequence.wanted
            if snapshots.publish(sequence.hashes[index], slot, passing=passing) and computed - sequence.computed == 1:
                # while generating, each new state replaces the previous one, its prefix
                if sequence.newest is not None:
                    snapshots.discard(sequence.newest, unused=True)
                sequence.newest = sequence.hashes[index]

    def restart(self, sequence: ScheduledSequence) -> None:
        """Discard its computed tokens: it waits to be recomputed, and first for the input that it lacks."""
        self._release(sequence)
        self.running.remove(sequence)
        sequence.running = False
        sequence.parked = sequence.ready < sequence.length and not sequence.beam_group
        sequence.since = None
        self.add(sequence)

    def note_holding(self, now: float) -> None:
        """Record since when each sequence holds. `now`: time.monotonic()."""
        for sequence in self.running:
            sequence.since = (now if sequence.since is None else sequence.since) if sequence.holding else None

    def expire(self, before: float) -> None:
        """Give back the blocks of sequences that have held since a time up to `before`."""
        for sequence in [
            sequence for sequence in self.running if sequence.since is not None and sequence.since <= before
        ]:
            if sequence.holding and not sequence.lent and not sequence.dispatched:
                self.restart(sequence)
                self.expired += 1

    @property
    def holding(self) -> list[ScheduledSequence]:
        """The sequences that hold blocks only for input that may come."""
        return [sequence for sequence in self.running if sequence.holding]

    def fork(self, sequence: ScheduledSequence, child: ScheduledSequence) -> None:
        """Start `child` running with everything that `sequence` has in the cache."""
        child.running = True
        if self.slots is not None:
            child.slot = self.slots.take()
        self._copy(sequence, child)
        insort(self.running, child, key=_rank)

    def replace(self, sequence: ScheduledSequence, by: ScheduledSequence) -> None:
        """Replace the cached tokens of `sequence` with those of `by`. Both are running."""
        held = sequence.blocks
        self._copy(by, sequence)
        self.pool.release(held)

    def _copy(self, sequence: ScheduledSequence, into: ScheduledSequence) -> None:
        self.pool.share(sequence.blocks)
        sequence.forked = into.forked = True
        into.charged = max(into.charged, sequence.computed)  # shared tokens are charged once
        into.tables = [Table(table.first, table.blocks[:]) for table in sequence.tables]
        into.computed = sequence.computed
        if self.slots is not None:
            assert sequence.slot is not None
            assert into.slot is not None
            self.slots.copy(sequence.slot, into.slot)

    def advance(self, sequence: ScheduledSequence, computed: int, *, publish: bool) -> None:
        """Record that tokens up to `computed` are in the cache. `publish`: let others find the full blocks. Frees the
        blocks that no later token sees or that held only rejected drafts, but none that a step in flight writes."""
        size = self.limits.block_size
        if sequence.drafted is not None and computed < sequence.drafted[1]:
            # its state includes a rejected draft: restore the state before the drafts
            computed = min(computed, sequence.drafted[0])
            assert self.slots is not None
            assert sequence.slot is not None
            self.slots.copy(sequence.held[computed], sequence.slot)
        full = range(sequence.computed // size, min(computed // size, len(sequence.hashes))) if publish else range(0)
        if self.accounts is not None:
            # the token drawn in this step counts, whether it has been appended or not
            self.accounts.generated(sequence, computed + (computed >= sequence.length - 1))
        if self.snapshots is not None:
            self.snapshots.note(sequence.hashes[index] for index in full)
            self._keep(self.snapshots, sequence, computed, publish=publish)
            sequence.drafted = None
        sequence.computed = computed
        for group, (table, window) in enumerate(zip(sequence.tables, self.limits.windows, strict=True)):
            for index in full:
                self.pool.publish(table.blocks[index - table.first], group_key(sequence.hashes[index], group))
            behind = first_visible(window, computed, size) - table.first
            if behind > 0:
                self.pool.release(table.blocks[:behind])
                del table.blocks[:behind]
                table.first += behind
            keep = self.limits.blocks(max(computed, sequence.dispatched)) - table.first
            self.pool.release(table.blocks[keep:])
            del table.blocks[keep:]

    def remove(self, sequence: ScheduledSequence) -> None:
        """Remove a finished, failed or cancelled sequence; free its blocks once no step in flight writes to them."""
        (self.running if sequence.running else self.waiting).remove(sequence)
        sequence.running = False
        if sequence.dispatched:
            self.removed.append(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: ScheduledSequence) -> None:
        for table in sequence.tables:
            self.pool.release(table.blocks)
        if self.slots is not None and sequence.slot is not None:
            self.slots.give(sequence.slot)
        sequence.slot = sequence.newest = None
        if self.snapshots is not None:
            for slot in sequence.held.values():
                self.snapshots.give(slot)
        sequence.held = {}
        sequence.drafted = None
        sequence.tables = []
        sequence.computed = 0
        sequence.forked = False

    def waste(self) -> float:
        """Share of the token slots in allocated blocks, over all groups, that hold no computed token (Kwon et al.,
        *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023, §3.1); 0 if no
        block is allocated. Only the last blocks of a sequence can have empty slots; a shared block counts once."""
        size = self.limits.block_size
        empty: dict[int, int] = {}
        for sequence in self.running:
            for table in sequence.tables:
                for index in range(sequence.computed // size, sequence.end):
                    block, free = table.blocks[index - table.first], min(size, (index + 1) * size - sequence.computed)
                    empty[block] = min(empty.get(block, size), free)
        return sum(empty.values()) / (self.pool.used * size) if empty else 0.0

    def audit(self) -> None:
        """Check the state: blocks against owners, and each sequence against its interval."""
        self.pool.audit(sequence.blocks for sequence in [*self.running, *self.removed])
        if self.slots is not None:
            slots = [sequence.slot for sequence in [*self.running, *self.removed] if sequence.slot is not None]
            assert len(slots) == len(self.running) + len(self.removed), "a running sequence has no state slot"
            self.slots.audit(slots)
        if self.snapshots is not None:
            sequences = [*self.running, *self.removed]
            self.snapshots.audit(slot for sequence in sequences for slot in sequence.held.values())
            for sequence in sequences:
                assert all(sequence.computed < place <= sequence.dispatched for place in sequence.held), (
                    f"{sequence.key} holds slots for states that no step writes: {sequence.held}"
                )
        for sequence in self.removed:
            assert sequence.dispatched, f"{sequence.key} is removed but keeps blocks that no step writes to"
        for sequence in self.waiting:
            assert not sequence.running, f"{sequence.key} waits and runs"
            assert not sequence.tables, f"{sequence.key} waits and holds blocks"
            assert sequence.slot is None, f"{sequence.key} waits and has a state slot"
            assert not sequence.held, f"{sequence.key} waits and keeps states"
            assert sequence.computed == 0, f"{sequence.key} waits and has {sequence.computed} tokens in the cache"
        for sequence in self.running:
            assert sequence.running, f"{sequence.key} is queued as running but not marked so"
            held = sequence.end * self.limits.block_size
            for table, window in zip(sequence.tables, self.limits.windows, strict=True):
                assert table.first + len(table.blocks) == sequence.end, (
                    f"{sequence.key}: tables end at different blocks"
                )
                seen = first_visible(window, sequence.computed, self.limits.block_size)
                assert table.first == seen, f"{sequence.key}: holds blocks from {table.first} on, sees from {seen} on"
            assert sequence.computed <= held, f"{sequence.key}: {sequence.computed} tokens in blocks of {held}"
            assert sequence.computed <= sequence.length, (
                f"{sequence.key}: {sequence.computed} tokens computed of {sequence.length}"
            )
            assert all(other.running for other in sequence.beam_group), f"{sequence.key} runs without its beam group"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_rank), "a queue is out of order"


def _rank(sequence: ScheduledSequence) -> Rank:
    return sequence.rank
