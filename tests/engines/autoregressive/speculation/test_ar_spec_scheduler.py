"""Drafts in the scheduler, without a model: they get what is left, and cost nobody anything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.cache.blocks import BlockPool
from segue.engines.autoregressive.schedule.decision import Decision, Limits, ScheduledSequence
from segue.engines.autoregressive.schedule.scheduler import Scheduler

SIZE = 4


def make(num_blocks: int, *, max_batch: int = 4, max_tokens: int = 16) -> Scheduler:
    return Scheduler(BlockPool(num_blocks), Limits(SIZE, max_batch, max_tokens))


def decoding(scheduler: Scheduler, *lengths: int) -> list[ScheduledSequence]:
    """Sequences whose prompts are computed and that have one token more."""
    sequences = [
        ScheduledSequence("abcd"[serial], (0, serial, serial), length, length) for serial, length in enumerate(lengths)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    while any(sequence.computed < sequence.length for sequence in sequences):
        decision = scheduler.next()
        scheduler.apply(decision)
        for run in decision.runs:
            scheduler.advance(run.sequence, run.stop, publish=False)
    for sequence in sequences:
        sequence.length = sequence.ready = sequence.length + 1
    return sequences


def widths(decision: Decision) -> dict[str, tuple[int, int]]:
    """By sequence: tokens of its run, and how many of them are drafts."""
    return {run.sequence.key: (run.tokens, run.drafts) for run in decision.runs}


def test_drafts_are_computed_with_the_last_known_token():
    scheduler = make(20)
    a, _ = decoding(scheduler, 4, 6)
    a.drafts = 3
    assert widths(scheduler.next()) == {"a": (4, 3), "b": (1, 0)}


def test_the_budget_goes_to_known_tokens_first():
    scheduler = make(100, max_tokens=10)
    a, b = decoding(scheduler, 4, 6)
    a.drafts = b.drafts = 5
    scheduler.add(ScheduledSequence("c", (0, 9, 9), 5, 5))
    assert widths(scheduler.next()) == {"a": (4, 3), "b": (1, 0), "c": (5, 0)}


def test_no_drafts_in_the_middle_of_a_prompt():
    scheduler = make(100, max_tokens=8)
    sequence = ScheduledSequence("a", (0, 0, 0), 12, 12, drafts=4)
    scheduler.add(sequence)
    decision = scheduler.next()
    assert widths(decision) == {"a": (8, 0)}
    scheduler.apply(decision)
    scheduler.advance(sequence, 8, publish=False)
    assert widths(scheduler.next()) == {"a": (8, 4)}


def test_blocks_that_a_prefill_needs_are_not_for_drafts():
    scheduler = make(4, max_tokens=8)
    [a] = decoding(scheduler, 3)
    a.drafts = 6
    scheduler.add(ScheduledSequence("b", (0, 9, 9), 12, 12))
    assert widths(scheduler.next()) == {"a": (1, 0), "b": (7, 0)}, "one block is free, and b will need it"
    scheduler.waiting.clear()
    assert widths(scheduler.next()) == {"a": (7, 6)}


def test_drafts_are_cut_to_the_free_blocks():
    scheduler = make(2, max_tokens=16)
    [a] = decoding(scheduler, 3)
    a.drafts = 9
    assert widths(scheduler.next()) == {"a": (5, 4)}


def test_nobody_is_preempted_for_drafts():
    scheduler = make(2)
    a, b = decoding(scheduler, 3, 3)
    a.drafts = b.drafts = 8
    decision = scheduler.next()
    assert decision.preempt == ()
    assert widths(decision) == {"a": (1, 0), "b": (1, 0)}


def test_rejected_drafts_give_their_blocks_back():
    scheduler = make(8)
    [a] = decoding(scheduler, 3)
    a.drafts = 9
    scheduler.apply(scheduler.next())
    assert len(a.blocks) == 4
    a.length = a.ready = 6
    scheduler.advance(a, 5, publish=False)
    scheduler.audit()
    assert (len(a.blocks), scheduler.pool.used) == (2, 2)


requests = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(requests, st.integers(8, 16), st.integers(1, 5), st.integers(1, 24), st.randoms(use_true_random=False))
def test_speculation_changes_only_how_fast(wanted, num_blocks, max_batch, max_tokens, random):
    """Everyone finishes; budgets are kept; the blocks held between steps are those of the computed tokens."""
    scheduler = make(num_blocks, max_batch=max_batch, max_tokens=max_tokens)
    totals = {}
    for serial, (prompt, output, _) in enumerate(wanted):
        scheduler.add(ScheduledSequence(f"r{serial}", (0, 0, serial), prompt, prompt))
        totals[f"r{serial}"] = prompt + output
    for _ in range(800):
        if not totals:
            break
        for sequence in scheduler.running:
            most = min(wanted[sequence.rank[2]][2], totals[sequence.key] - sequence.length)
            sequence.drafts = random.randint(0, max(0, most - 1))
        decision = scheduler.next()
        assert decision == scheduler.next()
        everyone = [*scheduler.running, *scheduler.waiting]
        proposed = [sequence.drafts for sequence in everyone]
        for sequence in everyone:
            sequence.drafts = 0
        plain = scheduler.next()
        for sequence, drafts in zip(everyone, proposed, strict=True):
            sequence.drafts = drafts
        assert decision.preempt == plain.preempt, "drafts preempt nobody"
        assert [(run.sequence.key, run.tokens - run.drafts) for run in decision.runs] == [
            (run.sequence.key, run.tokens) for run in plain.runs
        ], "drafts take no other token's place"
        assert sum(run.tokens for run in decision.runs) <= max_tokens
        scheduler.apply(decision)
        for run in decision.runs:
            sequence = run.sequence
            if run.stop - run.drafts == sequence.length:
                sequence.length += random.randint(0, run.drafts) + 1
                sequence.ready, sequence.drafts = sequence.length, 0
                scheduler.advance(sequence, sequence.length - 1, publish=False)
                if sequence.length >= totals[sequence.key]:
                    scheduler.remove(sequence)
                    del totals[sequence.key]
            else:
                scheduler.advance(sequence, run.stop, publish=False)
        scheduler.audit()
        for sequence in scheduler.running:
            assert len(sequence.blocks) == scheduler.limits.blocks(sequence.computed)
    assert not totals
    assert scheduler.pool.used == 0
