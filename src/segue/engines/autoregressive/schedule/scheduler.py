"""The queues of a stage and the ledger of its blocks. `schedule` decides; `Scheduler` carries the decision out."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from segue.engines.autoregressive.cache.blocks import BlockPool, first_visible, group_key
from segue.engines.autoregressive.cache.states import Snapshots, StateSlots
from segue.engines.autoregressive.schedule.jobs import Decision, Job, Limits, Run, Table
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
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.removed: list[Job] = []
        """Finished jobs whose blocks a step in flight still writes to."""
        self.preemptions = 0
        self.expired = 0
        """Sequences whose blocks were given back because they held for too long."""
        self.query_tokens = 0
        self.hit_tokens = 0

    def add(self, job: Job) -> None:
        insort(self.waiting, job, key=_rank)

    def next(self, in_flight: Seq[Run] = ()) -> Decision:
        """Decide the next step. `in_flight`: runs of the step in flight, which count as computed (`expect`)."""
        if self.accounts is not None:
            self.accounts.notice(self.waiting, self.running)
        slots = None if self.slots is None else self.slots.available
        return schedule(
            self.running, self.waiting, self.pool, self.limits, self.accounts, in_flight, slots, self.snapshots
        )

    def expect(self, run: Run) -> None:
        """Count a dispatched run as computed before it completes."""
        run.job.computed = run.stop

    def recall(self, run: Run) -> None:
        """Undo `expect`."""
        run.job.computed = run.start

    def dispatched(self, runs: Seq[Run]) -> None:
        """Mark the runs as dispatched: until they complete, the blocks they write to stay theirs."""
        for run in runs:
            run.job.dispatched = run.stop

    def completed(self, runs: Iterable[Run]) -> None:
        """Mark the runs as complete. Blocks of removed jobs stay readable until `settle`."""
        for run in runs:
            if run.job.dispatched == run.stop:  # otherwise a later step computes it
                run.job.dispatched = 0

    def settle(self) -> None:
        """Free the blocks of removed jobs that are in no step in flight any more."""
        for job in self.removed:
            if not job.dispatched:
                self._release(job)
        self.removed = [job for job in self.removed if job.dispatched]

    def apply(self, decision: Decision) -> list[tuple[int, int]]:
        """Preempt, then share cached blocks, then allocate: sharing first keeps hits from being evicted.

        Returns the copies to make before the step, as (from block, to block). A block may be in two of them: read all
        sources before writing any.
        """
        for job in decision.preempt:
            assert not job.dispatched, f"{job.key} is preempted while it is computed"
            self.restart(job)
            self.preemptions += 1
        for run in decision.runs:
            if not run.job.running:
                length = run.start // self.limits.block_size
                for blocks in run.hit:
                    self.pool.share(blocks)
                run.job.tables = [Table(length - len(blocks), list(blocks)) for blocks in run.hit]
                run.job.computed = run.start
                run.job.running = True
                if self.slots is not None:
                    run.job.slot = self.slots.take()
                    if self.snapshots is not None and length:
                        self.slots.copy(self.snapshots.use(run.job.hashes[length - 1]), run.job.slot)
                run.job.wanted = run.wanted
                if self.accounts is not None:
                    self.accounts.admit(run.job)
                self.query_tokens += run.job.length
                self.hit_tokens += run.start
                self.waiting.remove(run.job)
                insort(self.running, run.job, key=_rank)
        copies = []
        for run in decision.runs:
            self._hold_before_drafts(run)
        for run in decision.runs:
            self._hold(run)
            if run.copy:
                for table, tail in zip(run.job.tables, self.limits.tails(run.job), strict=True):
                    self.pool.release([tail])
                    [fresh] = self.pool.allocate(1)
                    table.blocks[run.start // self.limits.block_size - table.first] = fresh
                    copies.append((tail, fresh))
            if run.allocate:
                for table in run.job.tables:
                    last = table.blocks[-1] if table.blocks else None
                    table.blocks += self.pool.allocate(run.allocate, last)
        return copies

    def _hold_before_drafts(self, run: Run) -> None:
        """Reserve a slot for the recurrent state before the drafts, to restore it if one is rejected. Call this before
        `_hold`, which may take the last slot."""
        if run.drafts and self.snapshots is not None:
            place = run.stop - run.drafts
            slot = self.snapshots.reserve()
            assert slot is not None, "drafts without a free slot for the state before them"
            run.job.held[place] = slot
            run.job.drafted = (place, run.stop)

    def _hold(self, run: Run) -> None:
        """Reserve slots for the states that the run keeps, if slots are free and the state is not kept already."""
        for place in run.keep:
            if place in run.job.held:
                continue
            assert self.snapshots is not None
            index = place // self.limits.block_size - 1
            known = index < len(run.job.hashes) and self.snapshots.has(run.job.hashes[index])
            slot = None if known else self.snapshots.reserve()
            if slot is not None:
                run.job.held[place] = slot

    def _keep(self, snapshots: Snapshots, job: Job, computed: int, *, publish: bool) -> None:
        """Publish the states computed by now."""
        size = self.limits.block_size
        for place in sorted(job.held):
            if computed < place <= job.dispatched:
                continue  # a step in flight writes it
            slot, index = job.held.pop(place), place // size - 1
            if place % size or place > computed or not publish or index >= len(job.hashes):
                snapshots.give(slot)
                continue
            # a state after a prompt chunk: no sequence is known to need it
            passing = computed < job.length - 1 and place != job.wanted
            if snapshots.publish(job.hashes[index], slot, passing=passing) and computed - job.computed == 1:
                # while generating, each new state replaces the previous one, its prefix
                if job.newest is not None:
                    snapshots.discard(job.newest, unused=True)
                job.newest = job.hashes[index]

    def restart(self, job: Job) -> None:
        """Discard its computed tokens: it waits to be recomputed, and first for the input that it lacks."""
        self._release(job)
        self.running.remove(job)
        job.running = False
        job.parked = job.ready < job.length and not job.beam_group
        job.since = None
        self.add(job)

    def note_holding(self, now: float) -> None:
        """Record since when each sequence holds. `now`: time.monotonic()."""
        for job in self.running:
            job.since = (now if job.since is None else job.since) if job.holding else None

    def expire(self, before: float) -> None:
        """Give back the blocks of sequences that have held since a time up to `before`."""
        for job in [job for job in self.running if job.since is not None and job.since <= before]:
            if job.holding and not job.lent and not job.dispatched:
                self.restart(job)
                self.expired += 1

    @property
    def holding(self) -> list[Job]:
        """The sequences that hold blocks only for input that may come."""
        return [job for job in self.running if job.holding]

    def fork(self, job: Job, child: Job) -> None:
        """Start `child` running with everything that `job` has in the cache."""
        child.running = True
        if self.slots is not None:
            child.slot = self.slots.take()
        self._copy(job, child)
        insort(self.running, child, key=_rank)

    def replace(self, job: Job, by: Job) -> None:
        """Replace the cached tokens of `job` with those of `by`. Both are running."""
        held = job.blocks
        self._copy(by, job)
        self.pool.release(held)

    def _copy(self, job: Job, into: Job) -> None:
        self.pool.share(job.blocks)
        job.forked = into.forked = True
        into.charged = max(into.charged, job.computed)  # shared tokens are charged once
        into.tables = [Table(table.first, table.blocks[:]) for table in job.tables]
        into.computed = job.computed
        if self.slots is not None:
            assert job.slot is not None
            assert into.slot is not None
            self.slots.copy(job.slot, into.slot)

    def advance(self, job: Job, computed: int, *, publish: bool) -> None:
        """Record that tokens up to `computed` are in the cache. `publish`: let others find the full blocks. Frees the
        blocks that no later token sees or that held only rejected drafts, but none that a step in flight writes."""
        size = self.limits.block_size
        if job.drafted is not None and computed < job.drafted[1]:
            # its state includes a rejected draft: restore the state before the drafts
            computed = min(computed, job.drafted[0])
            assert self.slots is not None
            assert job.slot is not None
            self.slots.copy(job.held[computed], job.slot)
        full = range(job.computed // size, min(computed // size, len(job.hashes))) if publish else range(0)
        if self.accounts is not None:
            # the token drawn in this step counts, whether it has been appended or not
            self.accounts.generated(job, computed + (computed >= job.length - 1))
        if self.snapshots is not None:
            self.snapshots.note(job.hashes[index] for index in full)
            self._keep(self.snapshots, job, computed, publish=publish)
            job.drafted = None
        job.computed = computed
        for group, (table, window) in enumerate(zip(job.tables, self.limits.windows, strict=True)):
            for index in full:
                self.pool.publish(table.blocks[index - table.first], group_key(job.hashes[index], group))
            behind = first_visible(window, computed, size) - table.first
            if behind > 0:
                self.pool.release(table.blocks[:behind])
                del table.blocks[:behind]
                table.first += behind
            keep = self.limits.blocks(max(computed, job.dispatched)) - table.first
            self.pool.release(table.blocks[keep:])
            del table.blocks[keep:]

    def remove(self, job: Job) -> None:
        """Remove a finished, failed or cancelled sequence; free its blocks once no step in flight writes to them."""
        (self.running if job.running else self.waiting).remove(job)
        job.running = False
        if job.dispatched:
            self.removed.append(job)
        else:
            self._release(job)

    def _release(self, job: Job) -> None:
        for table in job.tables:
            self.pool.release(table.blocks)
        if self.slots is not None and job.slot is not None:
            self.slots.give(job.slot)
        job.slot = job.newest = None
        if self.snapshots is not None:
            for slot in job.held.values():
                self.snapshots.give(slot)
        job.held = {}
        job.drafted = None
        job.tables = []
        job.computed = 0
        job.forked = False

    def waste(self) -> float:
        """Share of the token slots in allocated blocks, over all groups, that hold no computed token (Kwon et al.,
        *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023, §3.1); 0 if no
        block is allocated. Only the last blocks of a sequence can have empty slots; a shared block counts once."""
        size = self.limits.block_size
        empty: dict[int, int] = {}
        for job in self.running:
            for table in job.tables:
                for index in range(job.computed // size, job.end):
                    block, free = table.blocks[index - table.first], min(size, (index + 1) * size - job.computed)
                    empty[block] = min(empty.get(block, size), free)
        return sum(empty.values()) / (self.pool.used * size) if empty else 0.0

    def audit(self) -> None:
        """Check the state: blocks against owners, and each sequence against its interval."""
        self.pool.audit(job.blocks for job in [*self.running, *self.removed])
        if self.slots is not None:
            slots = [job.slot for job in [*self.running, *self.removed] if job.slot is not None]
            assert len(slots) == len(self.running) + len(self.removed), "a running sequence has no state slot"
            self.slots.audit(slots)
        if self.snapshots is not None:
            jobs = [*self.running, *self.removed]
            self.snapshots.audit(slot for job in jobs for slot in job.held.values())
            for job in jobs:
                assert all(job.computed < place <= job.dispatched for place in job.held), (
                    f"{job.key} holds slots for states that no step writes: {job.held}"
                )
        for job in self.removed:
            assert job.dispatched, f"{job.key} is removed but keeps blocks that no step writes to"
        for job in self.waiting:
            assert not job.running, f"{job.key} waits and runs"
            assert not job.tables, f"{job.key} waits and holds blocks"
            assert job.slot is None, f"{job.key} waits and has a state slot"
            assert not job.held, f"{job.key} waits and keeps states"
            assert job.computed == 0, f"{job.key} waits and has {job.computed} tokens in the cache"
        for job in self.running:
            assert job.running, f"{job.key} is queued as running but not marked so"
            held = job.end * self.limits.block_size
            for table, window in zip(job.tables, self.limits.windows, strict=True):
                assert table.first + len(table.blocks) == job.end, f"{job.key}: tables end at different blocks"
                seen = first_visible(window, job.computed, self.limits.block_size)
                assert table.first == seen, f"{job.key}: holds blocks from {table.first} on, sees from {seen} on"
            assert job.computed <= held, f"{job.key}: {job.computed} tokens in blocks of {held}"
            assert job.computed <= job.length, f"{job.key}: {job.computed} tokens computed of {job.length}"
            assert all(other.running for other in job.beam_group), f"{job.key} runs without its beam group"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_rank), "a queue is out of order"


def _rank(job: Job) -> Rank:
    return job.rank
