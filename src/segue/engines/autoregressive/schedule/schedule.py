"""Decides which sequences compute how many tokens in the next step. Pure: `Scheduler.apply` carries the decision out.

One rule covers prefill, chunked prefill, decode, recomputation and speculation: a sequence has `length` known tokens,
`computed` of them are in the KV cache, the inputs of `ready` of them are available, and `drafts` draft tokens may
follow: it wants `ready + drafts - computed` tokens. `continue_running` serves running sequences first, in order of rank
(priority, then arrival). `admission` then admits waiting ones, by rank too, or in fair shares between tenants
(`policies`), and looks their prompts up in the prefix cache. Drafts come last: they get the remaining budget and free
blocks, and no sequence is preempted for them. If some sequences decode, prefills share `prefill_chunk` tokens of the
step, so a long prompt delays the next token of others by at most one chunk.

When blocks run short, sequences are preempted and later recomputed: those that hold for more input first (`hold`), then
paused ones (their downstream is full, so they cannot use their blocks), then those of lower rank, then those of higher
rank that wait for an input. So the first runnable sequence always runs, whatever the others hold: with finite outputs,
every request finishes. A waiting sequence may preempt only holding and paused ones, and admission ends at the first one
that does not fit: smaller ones never overtake it forever. A waiting sequence whose next block a running one is
computing waits for it: equal prompts that arrive together are computed once.

A forked sequence shares blocks with its copies. If its next token goes to a block that others still hold, it takes a
copy of that block first. The beams of one request form a beam group: they compute their next tokens in one step, all or
none, and are preempted together.

Spans of a prompt that must be computed whole (`bidirectional`) start if the budget has a token left, and may exceed it
by less than their own length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace

from segue.engines.autoregressive.cache.blocks import BlockPool
from segue.engines.autoregressive.cache.states import Snapshots, places
from segue.engines.autoregressive.schedule.admission import admission_of, admit_waiting
from segue.engines.autoregressive.schedule.bidirectional import fitting, whole
from segue.engines.autoregressive.schedule.decision import (
    Decision,
    Ledger,
    Limits,
    ScheduledSequence,
    ScheduledTokens,
    missing,
)
from segue.engines.autoregressive.schedule.policies import Accounts


def continue_running(
    running: Seq[ScheduledSequence], ledger: Ledger, limits: Limits, preempted: list[ScheduledSequence]
) -> list[ScheduledTokens]:
    """Runs of sequences that are already running; adds the sequences to preempt to `preempted`."""
    runs: list[ScheduledTokens] = []
    able = [sequence for sequence in running if sequence.runnable]
    settled: set[int] = set()  # scheduled or preempted: can no longer be victims
    budget = limits.max_tokens
    prefill = limits.prefill(any(sequence.decoding for sequence in able))
    for place, sequence in enumerate(able):
        if budget <= 0 or len(runs) == limits.max_batch:
            break
        unit = sequence.unit
        if id(sequence) in settled or len(unit) > min(budget, limits.max_batch - len(runs)):
            continue
        if not sequence.decoding and prefill <= 0:
            continue
        # a long prefill leaves one token to each sequence behind it, so that their decoding does not stall
        behind = min(len(able) - place - 1, limits.max_batch - len(runs) - 1)
        tokens = min(sequence.at_once, max(1, budget - behind))
        if not sequence.decoding:
            tokens = min(tokens, prefill)
        tokens = whole(sequence.spans, sequence.computed, tokens)
        settled.update(map(id, unit))
        while (short := _needed(unit, tokens, ledger, limits) > ledger.available) and (
            victim := _victim(running, sequence, settled)
        ):
            settled.update(map(id, victim.together))
            preempted += victim.together
            for other in victim.together:
                ledger.drop(other.blocks)
        if short:
            room = min(tokens, _room(sequence, ledger, limits)) if len(unit) == 1 else 0
            tokens = fitting(sequence.spans, sequence.computed, room)
        if tokens <= 0:
            # all others hold blocks that they use in this step, or lend: wait one step, unless one that lends needs its
            # blocks now
            settled.difference_update(map(id, unit))
            continue
        for one in unit:
            runs.append(_run(one, tokens, ledger, limits))
            budget -= tokens
            prefill -= 0 if sequence.decoding else tokens
    return runs


def _needed(unit: Seq[ScheduledSequence], tokens: int, ledger: Ledger, limits: Limits) -> int:
    """Blocks for this many more tokens of each sequence, including copies of blocks that they or others share."""
    new, tails = 0, []
    for sequence in unit:
        new += len(limits.windows) * max(0, limits.blocks(sequence.computed + tokens) - sequence.end)
        if sequence.forked:
            tails += limits.tails(sequence)
    if not tails:
        return new
    # if no other sequence holds the block, the last one keeps it instead of copying it
    return new + sum(min(count, ledger.holders(tail) - 1) for tail, count in Counter(tails).items())


def _room(sequence: ScheduledSequence, ledger: Ledger, limits: Limits) -> int:
    """How many more tokens fit into its blocks and the free ones."""
    groups, tails = len(limits.windows), limits.tails(sequence)
    free = ledger.available - (len(tails) if ledger.shared(tails) else 0)
    return 0 if free < 0 else (sequence.end + free // groups) * limits.block_size - sequence.computed


def _run(sequence: ScheduledSequence, tokens: int, ledger: Ledger, limits: Limits) -> ScheduledTokens:
    """The next tokens of a running sequence, recorded in the ledger."""
    copy = False
    if sequence.forked and ledger.shared(tails := limits.tails(sequence)):
        copy = True
        ledger.drop(tails)
        ledger.take(len(tails))
    new = max(0, limits.blocks(sequence.computed + tokens) - sequence.end)
    ledger.take(len(limits.windows) * new)
    return ScheduledTokens(sequence, sequence.computed, tokens, new, copy=copy)


def _victim(
    running: Seq[ScheduledSequence], sequence: ScheduledSequence, settled: set[int]
) -> ScheduledSequence | None:
    """Choose the one to preempt for `sequence`: one that holds for more input, else a paused one, else one of lower
    rank (any, for a sequence that is lent), else one that waits for input."""
    others = [
        other
        for other in reversed(running)
        if other.tables
        and not other.lent
        and sequence not in other.beam_group
        and settled.isdisjoint(map(id, other.together))
    ]
    for kind in (
        lambda other: other.holding,
        lambda other: other.paused,
        lambda other: sequence.lent or other.rank > sequence.rank,
        lambda other: not other.runnable,
    ):
        for other in others:
            if kind(other):
                return other
    return None


def schedule(
    running: Seq[ScheduledSequence],
    waiting: Seq[ScheduledSequence],
    pool: BlockPool,
    limits: Limits,
    accounts: Accounts | None = None,
    in_flight: Seq[ScheduledTokens] = (),
    slots: int | None = None,
    snapshots: Snapshots | None = None,
) -> Decision:
    """Decide the next step. `running` and `waiting` are sorted by rank; nothing is changed. `accounts`: admit waiting
    requests in fair shares, else by rank. `in_flight`: runs of the step in flight, whose blocks are not yet published.
    `slots`: how many more sequences can have a state; None: the decoder has no states. `snapshots`: the kept states of
    prefixes, if states are reused."""
    ledger = Ledger(pool)
    preempted: list[ScheduledSequence] = []
    runs = continue_running(running, ledger, limits, preempted)
    if snapshots is not None:
        size = limits.block_size
        runs = [replace(run, keep=places(run.sequence, run.start, run.stop, run.sequence.wanted, size)) for run in runs]
    if not preempted and waiting:
        admission = admission_of(running, runs, ledger, limits, pool, in_flight, slots, snapshots)
        admit_waiting(admission, waiting, accounts)
        runs = admission.runs + admission.admitted
        preempted = admission.preempted
    if not preempted and any(run.sequence.drafts for run in runs):
        runs = _add_drafts(running, runs, ledger, limits, keeps=snapshots is not None)
    return Decision(tuple(preempted), tuple(runs))


def _add_drafts(
    running: Seq[ScheduledSequence], runs: Seq[ScheduledTokens], ledger: Ledger, limits: Limits, *, keeps: bool
) -> list[ScheduledTokens]:
    """The runs, with drafts that fit into the remaining budget and blocks; blocks that prefills will still need are not
    used. `keeps`: keep the state before drafts, to continue from it if one is rejected."""
    planned = {id(run.sequence): run.allocate for run in runs}
    under_way = [
        (sequence, [len(table.blocks) for table in sequence.tables])
        for sequence in running
        if not (sequence.paused or sequence.holding)
    ]
    under_way += [(run.sequence, [len(blocks) for blocks in run.hit]) for run in runs if not run.sequence.running]
    promised = sum(
        missing(limits, sequence, [held + planned.get(id(sequence), 0) for held in tables])
        for sequence, tables in under_way
    )
    groups = len(limits.windows)
    spare = max(0, ledger.available - promised) // groups
    budget = limits.max_tokens - sum(run.tokens for run in runs)
    extended = []
    for run in runs:
        sequence = run.sequence
        end = (sequence.end if sequence.running else run.start // limits.block_size) + run.allocate
        room = (end + spare) * limits.block_size - run.stop
        drafts = min(sequence.drafts, budget, room) if run.stop == sequence.length else 0
        if drafts > 0:
            new = max(0, limits.blocks(run.stop + drafts) - end)
            budget -= drafts
            spare -= new
            keep = tuple(sorted({*run.keep, run.stop})) if keeps else run.keep
            run = replace(run, tokens=run.tokens + drafts, allocate=run.allocate + new, drafts=drafts, keep=keep)
        extended.append(run)
    return extended
