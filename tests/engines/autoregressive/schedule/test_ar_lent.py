"""Sequences that lend their blocks are admitted first, take blocks from all others, and give none."""

from __future__ import annotations

from ar_scheduling import advance, make, new_sequence

from segue.engines.autoregressive.schedule.decision import ScheduledSequence
from segue.engines.autoregressive.schedule.policies import Accounts


def lent(key: str, length: int, *, arrival: float = 9.0) -> ScheduledSequence:
    """Its newest token is not computed."""
    one = new_sequence(key, length, arrival=arrival)
    one.lent = one.open = True
    one.ready = length - 1
    return one


def test_one_is_admitted_before_an_older_one_that_does_not_fit() -> None:
    for accounts in (None, Accounts()):
        scheduler = make(5)
        scheduler.accounts = accounts
        scheduler.add(lent("whole", 9))
        advance(scheduler)
        old, late = new_sequence("old", 15, arrival=1.0), lent("late", 8)
        scheduler.add(old)
        scheduler.add(late)
        decision = advance(scheduler)
        assert [run.sequence for run in decision.runs] == [late]
        assert not decision.preempt


def test_its_blocks_are_taken_by_nobody() -> None:
    scheduler = make(4)
    whole, held = lent("whole", 6), new_sequence("held", 5, arrival=1.0)
    held.open, held.ready = True, 4
    for one in (whole, held):
        scheduler.add(one)
    advance(scheduler)
    assert scheduler.holding == [held, whole]
    old = new_sequence("old", 8, arrival=0.0)
    scheduler.add(old)
    assert advance(scheduler).preempt == (held,)  # one that only waits for input gives its blocks
    advance(scheduler)
    for _ in range(6):
        decision = advance(scheduler)
        assert not decision.preempt
    assert old.computed == 8  # it waits for a block
    assert whole.blocks
    scheduler.note_holding(1.0)
    scheduler.expire(100.0)
    assert whole.blocks


def test_it_takes_blocks_from_older_ones() -> None:
    """While it runs, from any; while it waits, from one that cannot go on."""
    scheduler = make(4, max_tokens=3)
    old, one = new_sequence("old", 3, arrival=0.0), lent("one", 12)
    scheduler.add(old)
    advance(scheduler)
    scheduler.add(one)
    preempted = [other for _ in range(12) for other in advance(scheduler).preempt]
    assert preempted == [old]
    assert one.computed == 11

    scheduler = make(4)
    stuck, first = new_sequence("stuck", 7, arrival=0.0), lent("first", 7)
    for each in (stuck, first):
        scheduler.add(each)
    for _ in range(3):
        advance(scheduler)
    assert (stuck.length, stuck.computed) == (9, 8)  # its next token has no block
    second = lent("second", 6)
    scheduler.add(second)
    decision = advance(scheduler)
    assert decision.preempt == (stuck,)
    if not decision.runs:
        decision = advance(scheduler)
    assert [run.sequence for run in decision.runs] == [second]
