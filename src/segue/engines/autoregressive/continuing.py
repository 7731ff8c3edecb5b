"""Which running sequences go on, and who gives its blocks to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from segue.engines.autoregressive.jobs import Job, Limits, Run
from segue.engines.autoregressive.ledger import Ledger
from segue.engines.autoregressive.mutual import fitting, whole


def continue_running(running: Seq[Job], ledger: Ledger, limits: Limits, preempted: list[Job]) -> list[Run]:
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
        tokens = min(job.at_once, max(1, budget - behind))
        if not job.decoding:
            tokens = min(tokens, prefill)
        tokens = whole(job.spans, job.computed, tokens)
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
            tokens = fitting(job.spans, job.computed, room)
        if tokens <= 0:
            continue  # all others hold what they are about to use: wait a step
        for one in unit:
            runs.append(_run(one, tokens, ledger, limits))
            budget -= tokens
            prefill -= 0 if job.decoding else tokens
    return runs


def _needed(unit: Seq[Job], tokens: int, ledger: Ledger, limits: Limits) -> int:
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


def _room(job: Job, ledger: Ledger, limits: Limits) -> int:
    """How many tokens more it can take."""
    groups, tails = len(limits.windows), limits.tails(job)
    free = ledger.available - (len(tails) if ledger.shared(tails) else 0)
    return 0 if free < 0 else (job.end + free // groups) * limits.block_size - job.computed


def _run(job: Job, tokens: int, ledger: Ledger, limits: Limits) -> Run:
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
