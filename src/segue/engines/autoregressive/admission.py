"""Which waiting sequences begin, and what of them is in the prefix cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

from segue.engines.autoregressive.blocks import BlockPool, common, find_hit, visible
from segue.engines.autoregressive.jobs import Job, Limits, Run
from segue.engines.autoregressive.ledger import Ledger, missing
from segue.engines.autoregressive.mutual import around, fitting, whole
from segue.engines.autoregressive.policies import Accounts
from segue.engines.autoregressive.snapshots import Snapshots, keep_for, places

_ENOUGH = sys.maxsize


def admit_waiting(
    running: Seq[Job],
    waiting: Seq[Job],
    runs: list[Run],
    ledger: Ledger,
    limits: Limits,
    pool: BlockPool,
    preempted: list[Job],
    accounts: Accounts | None,
    launched: Seq[Run],
    slots: int | None,
    snapshots: Snapshots | None,
) -> list[Run]:
    """Runs of waiting sequences that fit as a whole; paused running ones give way to them. Where states are kept for
    others, `runs` keep what those need who wait for them."""
    admitted: list[Run] = []
    if not waiting:
        return admitted
    prefill = limits.prefill(any(run.job.decoding for run in runs))
    prefill -= sum(run.tokens for run in runs if not run.job.decoding)
    budget = min(limits.max_tokens - sum(run.tokens for run in runs), prefill)
    room = limits.max_batch - sum(job.width for job in running if not job.paused)
    # a running one holds a slot, and keeps those of its forks free
    seats = _ENOUGH if slots is None else slots - sum(job.width - 1 for job in running)
    planned = {id(run.job): run.allocate for run in runs}
    groups = len(limits.windows)
    # what running prefills will still take: not to be given away
    promised = sum(
        missing(limits, job, [len(table.blocks) + planned.get(id(job), 0) for table in job.tables])
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
        length, hit = _hit(job, chain, pool, limits, snapshots)
        coming = alike = _in_flight(job, chain, length, [*launched, *runs, *admitted], limits)
        if snapshots is not None and alike > length:
            coming = _kept(job, chain, length, launched, (runs, admitted), limits)
        if coming > length:
            # somebody computes its next block in this very step: it waits, and its place is kept for it
            needed = missing(limits, job, visible(limits.windows, coming, limits.block_size))
            if needed + promised > ledger.available and not paused:
                break
            promised += needed
            room -= job.width
            continue
        found = [block for blocks in hit for block in blocks]
        needed = missing(limits, job, [len(blocks) for blocks in hit])
        while paused and (needed + ledger.unused(found) + promised > ledger.available or job.width > seats):
            victim = paused.pop().together
            seats += sum(other.width for other in victim)
            paused = [other for other in paused if other not in victim]
            preempted += victim
            for other in victim:
                ledger.drop(other.blocks)
        spare = ledger.available - ledger.unused(found) - promised
        if needed > spare or job.width > seats:
            break
        start = length * limits.block_size
        tokens = whole(job.spans, start, min(job.ready - start, budget))
        tokens = fitting(job.spans, start, min(tokens, (length + spare // groups) * limits.block_size - start))
        new = limits.blocks(start + tokens) - length
        ledger.share(found)
        ledger.take(groups * new)
        promised += missing(limits, job, [len(blocks) + new for blocks in hit])
        budget -= tokens
        room -= job.width
        seats -= job.width
        run = Run(job, start, tokens, new, hit)
        if snapshots is not None:
            wanted = max(alike, snapshots.met(chain)) * limits.block_size
            keep = places(job, run.start, run.stop, wanted, limits.block_size)
            run = replace(run, wanted=wanted, keep=keep)
        admitted.append(run)
        last = job
    return admitted


def _hit(
    job: Job, chain: Seq[bytes], pool: BlockPool, limits: Limits, snapshots: Snapshots | None
) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """`find_hit` where there is a state, too, if one is needed, and what is computed after it begins inside no span."""
    while True:
        length, hit = find_hit(pool, chain, limits.windows, limits.block_size)
        usable = _uncut(job, length, limits)
        if snapshots is not None:
            usable = snapshots.longest(chain[:usable])
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
    the wait ends; one that is paused, preempted or passed over is not in `runs`, and then the block is computed a
    second time.
    """
    return max((blocks for _, blocks in _alike(job, chain, length, runs, limits)), default=length)


def _alike(job: Job, chain: Seq[bytes], length: int, runs: Seq[Run], limits: Limits) -> Iterator[tuple[int, int]]:
    """Places of the runs of those who compute block `length` of its chain now, and how many blocks of it they will
    have."""
    if length == len(chain):
        return
    for place, run in enumerate(runs):
        theirs = run.job.hashes
        ahead = run.start < (length + 1) * limits.block_size <= len(theirs) * limits.block_size
        if ahead and run.job.rank < job.rank and theirs[length] == chain[length]:
            yield place, _uncut(job, common(theirs, chain), limits)


def _kept(
    job: Job, chain: Seq[bytes], length: int, launched: Seq[Run], deciding: Seq[list[Run]], limits: Limits
) -> int:
    """`_in_flight` with their states. Those that are not launched keep theirs where they part from it."""
    size = limits.block_size
    borders = [length * size]
    for place, blocks in _alike(job, chain, length, launched, limits):
        borders += [border for border in launched[place].job.held if border <= blocks * size]
    for runs in deciding:
        for place, blocks in _alike(job, chain, length, runs, limits):
            runs[place] = keep_for(runs[place], blocks * size)
            borders += [border for border in runs[place].keep if border <= blocks * size]
    return max(borders) // size
