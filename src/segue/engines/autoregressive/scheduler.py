"""Who runs how many tokens in the next step. `schedule` is pure; `Scheduler.apply` does what it says.

One rule covers prefill, chunked prefill, decode, recomputation and speculation: a sequence has `length` known tokens,
`computed` of them are in the KV cache, the inputs of `ready` of them are there, and `drafts` guessed ones may follow:
it wants `ready + drafts - computed` tokens. Running sequences come first, in order of rank (priority, then arrival),
then waiting ones: by rank too, or in fair shares between tenants (`policies`). Drafts come last: they get what budget
and free blocks are left, and nobody is preempted for them. Where some decode, prefills share `prefill_chunk` tokens of
the step: so long prompts hold up nobody's next token for longer than one chunk takes.

When blocks run short, sequences are preempted and later computed again: paused ones first (their downstream is full,
they cannot use their blocks), then those of lower rank, then those of higher rank that wait for an input. So the first
sequence that can run always does, whatever the others hold: with finite outputs, every request finishes. A waiting
sequence may push out paused ones only, and the first one that does not fit ends the admission: none is overtaken for
ever by smaller ones. A waiting sequence whose next block is being computed by a running one waits for it: equal
prompts that arrive together are computed once.

A sequence that was forked holds blocks with its copies. Its next token goes to a block that others hold too, unless
they have all moved on: it takes a copy of that block first. The beams of one request form a gang: they take their next
tokens in one step, all or none, and are preempted together.

Spans of a prompt that are computed whole (`mutual`) are begun where the budget has a token left, and may go beyond it
by less than their own length.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace

from segue.engines.autoregressive.blocks import BlockPool, common, find_hit, first_visible, group_key, visible
from segue.engines.autoregressive.jobs import Decision, Job, Limits, Run, Table
from segue.engines.autoregressive.mutual import around, fitting, whole
from segue.engines.autoregressive.policies import Accounts, Rank


class _Ledger:
    """The pool's books as they would be after the decisions so far. The pool itself is only read."""

    def __init__(self, pool: BlockPool) -> None:
        self._references = pool.references
        self._change: Counter[int] = Counter()
        self.available = pool.available

    def drop(self, blocks: Seq[int]) -> None:
        for block in blocks:
            self._change[block] -= 1
            self.available += self._references[block] + self._change[block] == 0

    def holders(self, block: int) -> int:
        return self._references[block] + self._change[block]

    def shared(self, tails: Seq[int]) -> bool:
        """Whether several hold these blocks of a sequence: where one group's is shared, all groups' are."""
        return bool(tails) and self.holders(tails[0]) > 1

    def unused(self, blocks: Seq[int]) -> int:
        """How many of these blocks would leave `available` when shared."""
        return sum(self._references[block] + self._change[block] == 0 for block in blocks)

    def share(self, blocks: Seq[int]) -> None:
        self.available -= self.unused(blocks)
        self._change.update(blocks)

    def take(self, count: int) -> None:
        self.available -= count


def schedule(
    running: Seq[Job],
    waiting: Seq[Job],
    pool: BlockPool,
    limits: Limits,
    accounts: Accounts | None = None,
    launched: Seq[Run] = (),
) -> Decision:
    """The next step. `running` and `waiting` are sorted by rank; nothing is changed. `accounts`: waiting ones are
    admitted in fair shares, else by rank. `launched`: runs whose blocks are being computed and not yet published."""
    ledger = _Ledger(pool)
    preempted: list[Job] = []
    runs = _continue(running, ledger, limits, preempted)
    if not preempted:
        runs += _admit(running, waiting, runs, ledger, limits, pool, preempted, accounts, launched)
    if not preempted and any(run.job.drafts for run in runs):
        runs = _widen(running, runs, ledger, limits)
    return Decision(tuple(preempted), tuple(runs))


def _continue(running: Seq[Job], ledger: _Ledger, limits: Limits, preempted: list[Job]) -> list[Run]:
    """Runs of sequences that are running already; adds to `preempted` those that must give way."""
    runs: list[Run] = []
    able = [job for job in running if job.runnable]
    settled: set[int] = set()  # scheduled or preempted: no longer victims
    budget = limits.max_tokens
    prefill = limits.prefill(any(job.decoding for job in able))
    for place, job in enumerate(able):
        if budget <= 0 or len(runs) == limits.max_batch:
            break
        unit = job.unit
        if id(job) in settled or len(unit) > min(budget, limits.max_batch - len(runs)):
            continue
        if not job.decoding and prefill <= 0:
            continue
        # a long prefill leaves one token to each of those behind it, so that their decoding does not stall
        behind = min(len(able) - place - 1, limits.max_batch - len(runs) - 1)
        tokens = min(job.ready - job.computed, max(1, budget - behind))
        if not job.decoding:
            tokens = min(tokens, prefill)
        tokens = whole(job.mutual, job.computed, tokens)
        settled.update(map(id, unit))
        while (short := _needed(unit, tokens, ledger, limits) > ledger.available) and (
            victim := _victim(running, job, settled)
        ):
            settled.update(map(id, victim.together))
            preempted += victim.together
            for other in victim.together:
                ledger.drop(other.blocks)
        if short:
            room = min(tokens, _room(job, ledger, limits)) if len(unit) == 1 else 0
            tokens = fitting(job.mutual, job.computed, room)
        if tokens <= 0:
            continue  # all others hold what they are about to use: wait a step
        for one in unit:
            runs.append(_run(one, tokens, ledger, limits))
            budget -= tokens
            prefill -= 0 if job.decoding else tokens
    return runs


def _needed(unit: Seq[Job], tokens: int, ledger: _Ledger, limits: Limits) -> int:
    """Blocks for so many more tokens of each, copies of blocks that they share among them or with others included."""
    new, tails = 0, []
    for job in unit:
        new += len(limits.windows) * max(0, limits.blocks(job.computed + tokens) - job.end)
        if job.forked:
            tails += limits.tails(job)
    if not tails:
        return new
    # where nobody else holds it, the last one keeps the block itself
    return new + sum(min(count, ledger.holders(tail) - 1) for tail, count in Counter(tails).items())


def _room(job: Job, ledger: _Ledger, limits: Limits) -> int:
    """How many tokens more it can take."""
    groups, tails = len(limits.windows), limits.tails(job)
    free = ledger.available - (len(tails) if ledger.shared(tails) else 0)
    return 0 if free < 0 else (job.end + free // groups) * limits.block_size - job.computed


def _run(job: Job, tokens: int, ledger: _Ledger, limits: Limits) -> Run:
    """The next tokens of a running sequence, entered in the ledger."""
    copy = False
    if job.forked and ledger.shared(tails := limits.tails(job)):
        copy = True
        ledger.drop(tails)
        ledger.take(len(tails))
    new = max(0, limits.blocks(job.computed + tokens) - job.end)
    ledger.take(len(limits.windows) * new)
    return Run(job, job.computed, tokens, new, copy=copy)


def _victim(running: Seq[Job], job: Job, settled: set[int]) -> Job | None:
    """Who gives its blocks to `job`: a paused one, else one of lower rank, else one that waits for input."""
    others = [
        other
        for other in reversed(running)
        if other.tables and job not in other.gang and settled.isdisjoint(map(id, other.together))
    ]
    for kind in (
        lambda other: other.paused,
        lambda other: other.rank > job.rank,
        lambda other: not other.runnable,
    ):
        for other in others:
            if kind(other):
                return other
    return None


def _admit(
    running: Seq[Job],
    waiting: Seq[Job],
    runs: list[Run],
    ledger: _Ledger,
    limits: Limits,
    pool: BlockPool,
    preempted: list[Job],
    accounts: Accounts | None,
    launched: Seq[Run],
) -> list[Run]:
    """Runs of waiting sequences that fit as a whole; paused running ones give way to them."""
    admitted: list[Run] = []
    if not waiting:
        return admitted
    prefill = limits.prefill(any(run.job.decoding for run in runs))
    prefill -= sum(run.tokens for run in runs if not run.job.decoding)
    budget = min(limits.max_tokens - sum(run.tokens for run in runs), prefill)
    room = limits.max_batch - sum(job.width for job in running if not job.paused)
    planned = {id(run.job): run.allocate for run in runs}
    groups = len(limits.windows)
    # what running prefills will still take: not to be given away
    promised = sum(
        _missing(limits, job, [len(table.blocks) + planned.get(id(job), 0) for table in job.tables])
        for job in running
        if not job.paused
    )
    paused = [job for job in running if job.paused and job.tables]
    last: Job | None = None  # admitted last
    order = waiting if accounts is None else accounts.order(waiting, lambda job: job is last)
    for job in order:
        if budget <= 0 or room <= 0:
            break
        if not job.runnable:
            continue
        if job.width > room:
            break
        # at least one token is always computed: the logits of the last one are wanted
        chain = [] if job.fresh else job.hashes[: (job.ready - 1) // limits.block_size]
        length, hit = _hit(job, chain, pool, limits)
        coming = _in_flight(job, chain, length, [*launched, *runs, *admitted], limits)
        if coming > length:
            # somebody computes its next block in this very step: it waits, and its place is kept for it
            needed = _missing(limits, job, visible(limits.windows, coming, limits.block_size))
            if needed + promised > ledger.available and not paused:
                break
            promised += needed
            room -= job.width
            continue
        found = [block for blocks in hit for block in blocks]
        needed = _missing(limits, job, [len(blocks) for blocks in hit])
        while needed + ledger.unused(found) + promised > ledger.available and paused:
            victim = paused.pop().together
            paused = [other for other in paused if other not in victim]
            preempted += victim
            for other in victim:
                ledger.drop(other.blocks)
        spare = ledger.available - ledger.unused(found) - promised
        if needed > spare:
            break
        start = length * limits.block_size
        tokens = whole(job.mutual, start, min(job.ready - start, budget))
        tokens = fitting(job.mutual, start, min(tokens, (length + spare // groups) * limits.block_size - start))
        new = limits.blocks(start + tokens) - length
        ledger.share(found)
        ledger.take(groups * new)
        promised += _missing(limits, job, [len(blocks) + new for blocks in hit])
        budget -= tokens
        room -= job.width
        admitted.append(Run(job, start, tokens, new, hit))
        last = job
    return admitted


def _hit(job: Job, chain: Seq[bytes], pool: BlockPool, limits: Limits) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """`find_hit`, and what is computed after it begins inside no span."""
    while True:
        length, hit = find_hit(pool, chain, limits.windows, limits.block_size)
        usable = _uncut(job, length, limits)
        if usable == length:
            return length, hit
        chain = chain[:usable]


def _uncut(job: Job, length: int, limits: Limits) -> int:
    """How many of its first `length` blocks it can go on from."""
    place = length * limits.block_size
    while (before := around(job.mutual, place)[0]) < place:
        place = before // limits.block_size * limits.block_size
    return place // limits.block_size


def _in_flight(job: Job, chain: Seq[bytes], length: int, runs: Seq[Run], limits: Limits) -> int:
    """How many blocks of its chain will be there once those have computed them who compute block `length` of it now.

    Only sequences of higher rank that run in this step, or in one that has not landed, are waited for: they get on, so
    the wait ends; one that is
    paused, preempted or passed over is not in `runs`, and then the block is computed a second time.
    """
    most = length
    if length < len(chain):
        for run in runs:
            theirs = run.job.hashes
            ahead = run.start < (length + 1) * limits.block_size <= len(theirs) * limits.block_size
            if ahead and run.job.rank < job.rank and theirs[length] == chain[length]:
                most = max(most, _uncut(job, common(theirs, chain), limits))
    return most


def _missing(limits: Limits, job: Job, held: Seq[int]) -> int:
    """Blocks that a sequence must still get, where it holds so many in each group."""
    return sum(max(0, least - have) for least, have in zip(limits.least_of(job), held, strict=True))


def _widen(running: Seq[Job], runs: Seq[Run], ledger: _Ledger, limits: Limits) -> list[Run]:
    """The runs, with drafts where they fit into what is left: blocks that prefills will still take are not for them."""
    planned = {id(run.job): run.allocate for run in runs}
    under_way = [(job, [len(table.blocks) for table in job.tables]) for job in running if not job.paused]
    under_way += [(run.job, [len(blocks) for blocks in run.hit]) for run in runs if not run.job.running]
    promised = sum(
        _missing(limits, job, [held + planned.get(id(job), 0) for held in tables]) for job, tables in under_way
    )
    groups = len(limits.windows)
    spare = max(0, ledger.available - promised) // groups
    budget = limits.max_tokens - sum(run.tokens for run in runs)
    widened = []
    for run in runs:
        job = run.job
        end = (job.end if job.running else run.start // limits.block_size) + run.allocate
        room = (end + spare) * limits.block_size - run.stop
        drafts = min(job.drafts, budget, room) if run.stop == job.length else 0
        if drafts > 0:
            new = max(0, limits.blocks(run.stop + drafts) - end)
            budget -= drafts
            spare -= new
            run = replace(run, tokens=run.tokens + drafts, allocate=run.allocate + new, drafts=drafts)
        widened.append(run)
    return widened


class Scheduler:
    """The two queues, the pool and the accounts; changes them as a `Decision` says."""

    def __init__(self, pool: BlockPool, limits: Limits, accounts: Accounts | None = None) -> None:
        self.pool = pool
        self.limits = limits
        self.accounts = accounts
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.leaving: list[Job] = []
        """Those that are over and have blocks that a launched step writes to."""
        self.preemptions = 0
        self.query_tokens = 0
        self.hit_tokens = 0

    def add(self, job: Job) -> None:
        insort(self.waiting, job, key=_rank)

    def next(self, launched: Seq[Run] = ()) -> Decision:
        """`launched`: the runs of a step that has not landed, which are taken to be computed (`expect`)."""
        if self.accounts is not None:
            self.accounts.notice(self.waiting, self.running)
        return schedule(self.running, self.waiting, self.pool, self.limits, self.accounts, launched)

    def expect(self, run: Run) -> None:
        """Decide as if a launched run had landed."""
        run.job.computed = run.stop

    def recall(self, run: Run) -> None:
        """Undo `expect`."""
        run.job.computed = run.start

    def launched(self, runs: Seq[Run]) -> None:
        """The device has been told to compute these runs: until they land, what they write to stays theirs."""
        for run in runs:
            run.job.launched = run.stop

    def landed(self, runs: Seq[Run]) -> None:
        """The device is done with these runs. What is over may still be looked at, until `settle`."""
        for run in runs:
            if run.job.launched == run.stop:  # else a later step has it
                run.job.launched = 0

    def settle(self) -> None:
        """Give back the blocks of those that are over and in no launched step any more."""
        for job in self.leaving:
            if not job.launched:
                self._release(job)
        self.leaving = [job for job in self.leaving if job.launched]

    def apply(self, decision: Decision) -> list[tuple[int, int]]:
        """Preempt, then share what was found, then allocate: sharing first keeps hits from being evicted.

        Returns the copies to make before the step, (from block, to block) each. A block may be in two of them: all are
        read before any is written.
        """
        for job in decision.preempt:
            assert not job.launched, f"{job.key} is preempted while it is computed"
            self._release(job)
            self.running.remove(job)
            job.running = False
            self.add(job)
            self.preemptions += 1
        for run in decision.runs:
            if not run.job.running:
                length = run.start // self.limits.block_size
                for blocks in run.hit:
                    self.pool.share(blocks)
                run.job.tables = [Table(length - len(blocks), list(blocks)) for blocks in run.hit]
                run.job.computed = run.start
                run.job.running = True
                if self.accounts is not None:
                    self.accounts.admit(run.job)
                self.query_tokens += run.job.length
                self.hit_tokens += run.start
                self.waiting.remove(run.job)
                insort(self.running, run.job, key=_rank)
        copies = []
        for run in decision.runs:
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

    def fork(self, job: Job, child: Job) -> None:
        """`child` runs from now on, with all that `job` has in the cache."""
        child.running = True
        self._copy(job, child)
        insort(self.running, child, key=_rank)

    def replace(self, job: Job, by: Job) -> None:
        """`job` gives up what it has in the cache for what `by` has there. Both run."""
        held = job.blocks
        self._copy(by, job)
        self.pool.release(held)

    def _copy(self, job: Job, into: Job) -> None:
        self.pool.share(job.blocks)
        job.forked = into.forked = True
        into.charged = max(into.charged, job.computed)  # what they share was paid for once
        into.tables = [Table(table.first, table.blocks[:]) for table in job.tables]
        into.computed = job.computed

    def advance(self, job: Job, computed: int, *, publish: bool) -> None:
        """Tokens up to `computed` are in the cache now. `publish`: let others find the blocks that are full. Blocks
        that no later token sees are given back, and those that only rejected drafts had; none of a launched run."""
        size = self.limits.block_size
        full = range(job.computed // size, min(computed // size, len(job.hashes))) if publish else range(0)
        if self.accounts is not None:
            # the token drawn in this step counts, be it appended already or not
            self.accounts.generated(job, computed + (computed >= job.length - 1))
        job.computed = computed
        for group, (table, window) in enumerate(zip(job.tables, self.limits.windows, strict=True)):
            for index in full:
                self.pool.publish(table.blocks[index - table.first], group_key(job.hashes[index], group))
            behind = first_visible(window, computed, size) - table.first
            if behind > 0:
                self.pool.release(table.blocks[:behind])
                del table.blocks[:behind]
                table.first += behind
            keep = self.limits.blocks(max(computed, job.launched)) - table.first
            self.pool.release(table.blocks[keep:])
            del table.blocks[keep:]

    def remove(self, job: Job) -> None:
        """The sequence is finished, failed or cancelled: give back what it holds, once no launched step writes it."""
        (self.running if job.running else self.waiting).remove(job)
        job.running = False
        if job.launched:
            self.leaving.append(job)
        else:
            self._release(job)

    def _release(self, job: Job) -> None:
        for table in job.tables:
            self.pool.release(table.blocks)
        job.tables = []
        job.computed = 0
        job.forked = False

    def waste(self) -> float:
        """Share of the slots of allocated blocks, over all groups, that hold no computed token (Kwon et al., *Efficient
        Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023, §3.1); 0 where none is
        allocated. Only the last blocks of a sequence can have empty slots; one that several share counts once."""
        size = self.limits.block_size
        empty: dict[int, int] = {}
        for job in self.running:
            for table in job.tables:
                for index in range(job.computed // size, job.end):
                    block, free = table.blocks[index - table.first], min(size, (index + 1) * size - job.computed)
                    empty[block] = min(empty.get(block, size), free)
        return sum(empty.values()) / (self.pool.used * size) if empty else 0.0

    def audit(self) -> None:
        """Check the books: blocks against owners, and each sequence against its interval."""
        self.pool.audit(job.blocks for job in [*self.running, *self.leaving])
        for job in self.leaving:
            assert job.launched, f"{job.key} is over and keeps blocks that nobody writes to"
        for job in self.waiting:
            assert not job.running, f"{job.key} waits and runs"
            assert not job.tables, f"{job.key} waits and holds blocks"
            assert job.computed == 0, f"{job.key} waits and has {job.computed} tokens in the cache"
        for job in self.running:
            assert job.running, f"{job.key} runs and does not know"
            held = job.end * self.limits.block_size
            for table, window in zip(job.tables, self.limits.windows, strict=True):
                assert table.first + len(table.blocks) == job.end, f"{job.key}: tables reach differently far"
                seen = first_visible(window, job.computed, self.limits.block_size)
                assert table.first == seen, f"{job.key}: has blocks from {table.first} on, sees from {seen} on"
            assert job.computed <= held, f"{job.key}: {job.computed} tokens in blocks of {held}"
            assert job.computed <= job.length, f"{job.key}: {job.computed} tokens computed of {job.length}"
            assert all(other.running for other in job.gang), f"{job.key} runs without its gang"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_rank), "a queue is out of order"


def _rank(job: Job) -> Rank:
    return job.rank
