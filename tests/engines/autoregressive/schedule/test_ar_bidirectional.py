"""Spans of a prompt that are computed whole: no step and no hit in the cache ends inside one, and everyone finishes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.cache.blocks import ROOT, BlockPool, block_hash
from segue.engines.autoregressive.schedule.bidirectional import around, check_bidirectional, fitting, longest_of, whole
from segue.engines.autoregressive.schedule.decision import Limits, ScheduledSequence
from segue.engines.autoregressive.schedule.scheduler import Scheduler
from segue.messages.errors import StageFailed

SIZE = 4
LONGEST = 9

spans = st.lists(st.tuples(st.integers(0, 5), st.integers(1, LONGEST)), max_size=3)
"""(text before it, its length) each."""
prompts = st.tuples(spans, st.integers(1, 6), st.sampled_from("ab"))


def placed(given_spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found, place = [], 0
    for gap, length in given_spans:
        start = place + gap + bool(found and not gap)  # none touches another
        found.append((start, start + length))
        place = start + length
    return tuple(found)


def sequence_of(serial: int, prompt: tuple[list[tuple[int, int]], int, str]) -> ScheduledSequence:
    bidirectional = placed(prompt[0])
    length = (bidirectional[-1][1] if bidirectional else 0) + prompt[1]
    keys = [ROOT]
    for start in range(0, length - SIZE + 1, SIZE):
        keys.append(block_hash(keys[-1], f"{prompt[2]}{bidirectional}{start}".encode()))
    return ScheduledSequence(
        f"r{serial}", (0, 0.0, serial), length, length, hashes=keys[1:], bidirectional=bidirectional
    )


def inside(bidirectional: tuple[tuple[int, int], ...], place: int) -> bool:
    return any(start < place < stop for start, stop in bidirectional)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(0, 6), st.integers(1, 8)), min_size=1, max_size=6),
    st.integers(0, 10),
    st.integers(1, 12),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([(None,), (None, 5), (3,), (None, 1, 9)]),
)
def test_spans_stay_whole_and_everyone_finishes(wanted, spare, max_tokens, chunk, windows):
    limits = Limits(SIZE, 4, max_tokens, windows, chunk)
    sequences = [sequence_of(serial, prompt) for serial, (prompt, _, _) in enumerate(wanted)]
    totals = {
        sequence.key: sequence.length + output for sequence, (_, _, output) in zip(sequences, wanted, strict=True)
    }
    need = max(limits.need(totals[sequence.key], longest_of(sequence.bidirectional)) for sequence in sequences)
    scheduler = Scheduler(BlockPool(need + spare), limits)
    arrivals = {sequence.key: start for sequence, (_, start, _) in zip(sequences, wanted, strict=True)}
    live = set(totals)
    for step in range(600):
        for sequence in sequences:
            if arrivals[sequence.key] == step:
                scheduler.add(sequence)
        decision = scheduler.next()
        taken = [run.tokens for run in decision.runs]
        assert sum(taken) < max_tokens + LONGEST
        runnable = [sequence for sequence in scheduler.running if sequence.runnable]
        if runnable:
            assert runnable[0] in [run.sequence for run in decision.runs], "the first in rank was passed over"
        scheduler.apply(decision)
        for run in decision.runs:
            assert not inside(run.sequence.bidirectional, run.start), "it begins in the middle of a span"
            assert not inside(run.sequence.bidirectional, run.stop), "it ends in the middle of a span"
            scheduler.advance(run.sequence, run.stop, publish=True)
            if run.stop == run.sequence.length:
                run.sequence.length += 1
                run.sequence.ready = run.sequence.length
                if run.sequence.length > totals[run.sequence.key]:
                    scheduler.remove(run.sequence)
                    live.discard(run.sequence.key)
        scheduler.audit()
        if not live:
            break
    assert not live, f"starved: {sorted(live)}"
    assert scheduler.pool.used == 0


def test_a_hit_ends_where_a_span_begins() -> None:
    scheduler = Scheduler(BlockPool(40), Limits(SIZE, 4, 64))
    first = sequence_of(0, ([(5, 8)], 6, "a"))  # tokens 5 to 12 of 19
    scheduler.add(first)
    scheduler.apply(scheduler.next())
    scheduler.advance(first, 12, publish=True)  # blocks up to the middle of the span; the fourth is not there
    second = sequence_of(1, ([(5, 8)], 6, "a"))
    scheduler.remove(first)
    scheduler.add(second)
    [run] = scheduler.next().runs
    assert (run.start, run.stop) == (4, 19)


@given(spans, st.integers(0, 40), st.integers(1, 12))
def test_places_around_a_span(given_spans, start, tokens):
    bidirectional = placed(given_spans)
    before, after = around(bidirectional, start)
    assert before <= start <= after
    assert not inside(bidirectional, before)
    assert not inside(bidirectional, after)
    assert not any(
        inside(((before, after),), place) and not inside(bidirectional, place) for place in range(before, after)
    )
    if not inside(bidirectional, start):
        taken = whole(bidirectional, start, tokens)
        assert taken > 0
        assert not inside(bidirectional, start + taken)
        assert taken <= tokens or (start, start + taken) in bidirectional
        assert 0 <= fitting(bidirectional, start, tokens) <= tokens


@pytest.mark.parametrize("bidirectional", [[(3, 3)], [(2, 5), (4, 6)], [(4, 6), (1, 2)], [(5, 11)], [(-1, 2)]])
def test_spans_that_are_none_are_a_stages_mistake(bidirectional) -> None:
    check_bidirectional([(0, 2), (2, 4), (9, 10)], 10, "llm")
    with pytest.raises(StageFailed):
        check_bidirectional(bidirectional, 10, "llm")
