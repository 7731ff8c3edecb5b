"""Who runs how many tokens in the next step. `schedule` is pure; `Scheduler.apply` does what it says.

One rule covers prefill, chunked prefill, decode and recomputation: a sequence has `length` known tokens, `computed` of
them are in the KV cache, and the inputs of `ready` of them are there; it wants `ready - computed` tokens. Running
sequences come first, in order of rank (priority, then arrival), then waiting ones.

When blocks run short, sequences are preempted and later computed again: paused ones first (their downstream is full,
they cannot use their blocks), then those of lower rank, then those of higher rank that wait for an input. So the first
sequence that can run always does, whatever the others hold: with finite outputs, every request finishes. A waiting
sequence may push out paused ones only, and the first one that does not fit ends the admission: none is overtaken for
ever by smaller ones.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from segue.engines.autoregressive.blocks import BlockPool, find_hit, first_visible, group_key


@dataclass(slots=True)
class Table:
    """A sequence's blocks in one group of layers."""

    first: int = 0
    """Blocks before this one lie wholly behind the group's window and were given back."""
    blocks: list[int] = field(default_factory=list)
    """`blocks[i]` holds tokens [(first + i) * block_size, (first + i + 1) * block_size)."""


@dataclass(slots=True, eq=False)
class Job:
    """A sequence as the scheduler sees it. The engine owns `length`, `ready`, `hashes`, `fresh` and `paused`; the
    scheduler owns `computed`, `tables` and `running`."""

    key: str
    rank: tuple[int, float, int]
    """(priority, arrival, serial): lower runs first."""
    length: int = 0
    """Known tokens: prompt and generated. 0: the prompt is not there yet."""
    ready: int = 0
    """Tokens whose inputs are there: all known ones, but for conditioning that has not arrived."""
    computed: int = 0
    """Tokens in the KV cache."""
    tables: list[Table] = field(default_factory=list)
    """One per group of layers, all reaching equally far; none while it waits."""
    hashes: list[bytes] = field(default_factory=list)
    """Hash chain of the full blocks that may be shared."""
    fresh: bool = False
    """Take no blocks from the prefix cache: every row of the prompt is wanted."""
    paused: bool = False
    running: bool = False

    @property
    def runnable(self) -> bool:
        return not self.paused and self.ready > self.computed

    @property
    def end(self) -> int:
        """Its tables reach up to this block."""
        return self.tables[0].first + len(self.tables[0].blocks) if self.tables else 0

    @property
    def blocks(self) -> list[int]:
        """All it holds, over all groups."""
        if len(self.tables) == 1:
            return self.tables[0].blocks
        return [block for table in self.tables for block in table.blocks]


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes the scheduler keeps to."""

    block_size: int
    max_batch: int
    max_tokens: int
    windows: tuple[int | None, ...] = (None,)
    """Per group of layers: how many tokens a query sees, itself included; None: all before it."""

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens, in one group."""
        return -(-tokens // self.block_size)

    def least(self, tokens: int) -> list[int]:
        """Per group: the most blocks that a sequence of so many tokens holds at once, computed in small steps."""
        return [
            self.blocks(tokens)
            if window is None
            # the window of the next token, at worst with its last token alone in a block
            else min(self.blocks(tokens), self.blocks(window - 1) + 1)
            for window in self.windows
        ]

    def need(self, tokens: int) -> int:
        """Blocks without which a sequence of so many tokens cannot be computed, over all groups."""
        return sum(self.least(tokens))

    def longest(self, num_blocks: int, most: int) -> int:
        """The most tokens, up to `most`, that a sequence can have where there are so many blocks."""
        return bisect_right(range(most + 1), num_blocks, key=self.need) - 1


@dataclass(frozen=True, slots=True)
class Run:
    """One sequence's part in a step."""

    job: Job
    start: int
    """First token to compute; before it, everything is in the cache."""
    tokens: int
    allocate: int
    """New blocks it needs in each group."""
    hit: tuple[tuple[int, ...], ...] = ()
    """Published blocks found for a sequence that is admitted, per group: those before `start` that can be seen."""

    @property
    def stop(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens in the next step: first the preemptions, then the runs."""

    preempt: tuple[Job, ...] = ()
    runs: tuple[Run, ...] = ()


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

    def unused(self, blocks: Seq[int]) -> int:
        """How many of these blocks would leave `available` when shared."""
        return sum(self._references[block] + self._change[block] == 0 for block in blocks)

    def share(self, blocks: Seq[int]) -> None:
        self.available -= self.unused(blocks)
        self._change.update(blocks)

    def take(self, count: int) -> None:
        self.available -= count


def schedule(running: Seq[Job], waiting: Seq[Job], pool: BlockPool, limits: Limits) -> Decision:
    """The next step. `running` and `waiting` are sorted by rank; nothing is changed."""
    ledger = _Ledger(pool)
    preempted: list[Job] = []
    runs = _continue(running, ledger, limits, preempted)
    if not preempted:
        runs += _admit(running, waiting, runs, ledger, limits, pool, preempted)
    return Decision(tuple(preempted), tuple(runs))


def _continue(running: Seq[Job], ledger: _Ledger, limits: Limits, preempted: list[Job]) -> list[Run]:
    """Runs of sequences that are running already; adds to `preempted` those that must give way."""
    runs: list[Run] = []
    able = [job for job in running if job.runnable]
    settled: set[int] = set()  # scheduled or preempted: no longer victims
    budget = limits.max_tokens
    for place, job in enumerate(able):
        if budget == 0 or len(runs) == limits.max_batch:
            break
        if id(job) in settled:
            continue
        # a long prefill leaves one token to each of those behind it, so that their decoding does not stall
        behind = min(len(able) - place - 1, limits.max_batch - len(runs) - 1)
        tokens = min(job.ready - job.computed, max(1, budget - behind))
        settled.add(id(job))
        groups = len(limits.windows)
        while groups * (limits.blocks(job.computed + tokens) - job.end) > ledger.available:
            victim = _victim(running, job, settled)
            if victim is None:
                break
            settled.add(id(victim))
            preempted.append(victim)
            ledger.drop(victim.blocks)
        room = (job.end + ledger.available // groups) * limits.block_size - job.computed
        tokens = min(tokens, room)
        if tokens <= 0:
            continue  # all others hold what they are about to use: wait a step
        new = max(0, limits.blocks(job.computed + tokens) - job.end)
        ledger.take(groups * new)
        budget -= tokens
        runs.append(Run(job, job.computed, tokens, new))
    return runs


def _victim(running: Seq[Job], job: Job, settled: set[int]) -> Job | None:
    """Who gives its blocks to `job`: a paused one, else one of lower rank, else one that waits for input."""
    others = [other for other in reversed(running) if other.tables and id(other) not in settled]
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
) -> list[Run]:
    """Runs of waiting sequences that fit as a whole; paused running ones give way to them."""
    admitted: list[Run] = []
    if not waiting:
        return admitted
    budget = limits.max_tokens - sum(run.tokens for run in runs)
    room = limits.max_batch - sum(not job.paused for job in running)
    planned = {id(run.job): run.allocate for run in runs}
    groups = len(limits.windows)
    # what running prefills will still take: not to be given away
    promised = sum(
        _missing(limits, job.length, [len(table.blocks) + planned.get(id(job), 0) for table in job.tables])
        for job in running
        if not job.paused
    )
    paused = [job for job in running if job.paused and job.tables]
    for job in waiting:
        if budget <= 0 or room <= 0:
            break
        if not job.runnable:
            continue
        # at least one token is always computed: the logits of the last one are wanted
        length, hit = find_hit(
            pool,
            [] if job.fresh else job.hashes[: (job.ready - 1) // limits.block_size],
            limits.windows,
            limits.block_size,
        )
        found = [block for blocks in hit for block in blocks]
        whole = _missing(limits, job.length, [len(blocks) for blocks in hit])
        while whole + ledger.unused(found) + promised > ledger.available and paused:
            victim = paused.pop()
            preempted.append(victim)
            ledger.drop(victim.blocks)
        spare = ledger.available - ledger.unused(found) - promised
        if whole > spare:
            break
        start = length * limits.block_size
        tokens = min(job.ready - start, budget, (length + spare // groups) * limits.block_size - start)
        new = limits.blocks(start + tokens) - length
        ledger.share(found)
        ledger.take(groups * new)
        promised += _missing(limits, job.length, [len(blocks) + new for blocks in hit])
        budget -= tokens
        room -= 1
        admitted.append(Run(job, start, tokens, new, hit))
    return admitted


def _missing(limits: Limits, length: int, held: Seq[int]) -> int:
    """Blocks that a sequence of `length` known tokens must still get, where it holds so many in each group."""
    return sum(max(0, least - have) for least, have in zip(limits.least(length), held, strict=True))


class Scheduler:
    """The two queues and the pool; changes them as a `Decision` says."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.preemptions = 0
        self.query_tokens = 0
        self.hit_tokens = 0

    def add(self, job: Job) -> None:
        insort(self.waiting, job, key=_rank)

    def next(self) -> Decision:
        return schedule(self.running, self.waiting, self.pool, self.limits)

    def apply(self, decision: Decision) -> None:
        """Preempt, then share what was found, then allocate: sharing first keeps hits from being evicted."""
        for job in decision.preempt:
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
                self.query_tokens += run.job.length
                self.hit_tokens += run.start
                self.waiting.remove(run.job)
                insort(self.running, run.job, key=_rank)
        for run in decision.runs:
            if run.allocate:
                for table in run.job.tables:
                    last = table.blocks[-1] if table.blocks else None
                    table.blocks += self.pool.allocate(run.allocate, last)

    def advance(self, job: Job, computed: int, *, publish: bool) -> None:
        """Tokens up to `computed` are in the cache now. `publish`: let others find the blocks that are full. Blocks
        that no later token sees are given back."""
        size = self.limits.block_size
        full = range(job.computed // size, min(computed // size, len(job.hashes))) if publish else range(0)
        job.computed = computed
        for group, (table, window) in enumerate(zip(job.tables, self.limits.windows, strict=True)):
            for index in full:
                self.pool.publish(table.blocks[index - table.first], group_key(job.hashes[index], group))
            behind = first_visible(window, computed, size) - table.first
            if behind > 0:
                self.pool.release(table.blocks[:behind])
                del table.blocks[:behind]
                table.first += behind

    def remove(self, job: Job) -> None:
        """The sequence is finished, failed or cancelled: give back what it holds."""
        self._release(job)
        (self.running if job.running else self.waiting).remove(job)
        job.running = False

    def _release(self, job: Job) -> None:
        for table in job.tables:
            self.pool.release(table.blocks)
        job.tables = []
        job.computed = 0

    def audit(self) -> None:
        """Check the books: blocks against owners, and each sequence against its interval."""
        self.pool.audit(job.blocks for job in self.running)
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
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_rank), "a queue is out of order"


def _rank(job: Job) -> tuple[int, float, int]:
    return job.rank
