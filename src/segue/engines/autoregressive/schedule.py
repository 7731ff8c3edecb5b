"""Who runs how many tokens in the next step. Pure: `Scheduler.apply` does what is decided here.

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

from collections.abc import Sequence as Seq
from dataclasses import replace

from segue.engines.autoregressive.admission import admit_waiting
from segue.engines.autoregressive.blocks import BlockPool
from segue.engines.autoregressive.continuing import continue_running
from segue.engines.autoregressive.jobs import Decision, Job, Limits, Run
from segue.engines.autoregressive.ledger import Ledger, missing
from segue.engines.autoregressive.policies import Accounts
from segue.engines.autoregressive.snapshots import Snapshots, places


def schedule(
    running: Seq[Job],
    waiting: Seq[Job],
    pool: BlockPool,
    limits: Limits,
    accounts: Accounts | None = None,
    launched: Seq[Run] = (),
    slots: int | None = None,
    snapshots: Snapshots | None = None,
) -> Decision:
    """The next step. `running` and `waiting` are sorted by rank; nothing is changed. `accounts`: waiting ones are
    admitted in fair shares, else by rank. `launched`: runs whose blocks are being computed and not yet published.
    `slots`: how many sequences more can have a state; None: they have none. `snapshots`: of prefixes, where states are
    kept for others."""
    ledger = Ledger(pool)
    preempted: list[Job] = []
    runs = continue_running(running, ledger, limits, preempted)
    if snapshots is not None:
        size = limits.block_size
        runs = [replace(run, keep=places(run.job, run.start, run.stop, run.job.wanted, size)) for run in runs]
    if not preempted:
        runs += admit_waiting(
            running, waiting, runs, ledger, limits, pool, preempted, accounts, launched, slots, snapshots
        )
    if not preempted and any(run.job.drafts for run in runs):
        runs = _widen(running, runs, ledger, limits, keeps=snapshots is not None)
    return Decision(tuple(preempted), tuple(runs))


def _widen(running: Seq[Job], runs: Seq[Run], ledger: Ledger, limits: Limits, *, keeps: bool) -> list[Run]:
    """The runs, with drafts where they fit into what is left: blocks that prefills will still take are not for them.
    `keeps`: the state before drafts is kept, to go on from where one is rejected."""
    planned = {id(run.job): run.allocate for run in runs}
    under_way = [(job, [len(table.blocks) for table in job.tables]) for job in running if not job.paused]
    under_way += [(run.job, [len(blocks) for blocks in run.hit]) for run in runs if not run.job.running]
    promised = sum(
        missing(limits, job, [held + planned.get(id(job), 0) for held in tables]) for job, tables in under_way
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
            keep = tuple(sorted({*run.keep, run.stop})) if keeps else run.keep
            run = replace(run, tokens=run.tokens + drafts, allocate=run.allocate + new, drafts=drafts, keep=keep)
        widened.append(run)
    return widened
