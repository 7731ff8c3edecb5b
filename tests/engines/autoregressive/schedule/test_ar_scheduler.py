"""The scheduler without a model: budgets are kept, blocks conserved, everyone finishes, nobody starves."""

from __future__ import annotations

from dataclasses import dataclass

from ar_scheduling import SIZE, advance, hashes, make, new_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.cache.blocks import BlockPool
from segue.engines.autoregressive.schedule.decision import Decision, Limits, ScheduledSequence
from segue.engines.autoregressive.schedule.policies import Accounts, rank
from segue.engines.autoregressive.schedule.schedule import schedule
from segue.graph.kinds.autoregressive import SCHEDULINGS
from segue.kernels.attention.interface import Chunked


@dataclass
class Sim:
    """A request of the simulation: it wants `total` tokens, the prompt's among them."""

    sequence: ScheduledSequence
    total: int
    prompt: int
    lag: int
    """Conditioned: rows arrive this many steps late (0: not conditioned)."""
    age: int = 0


def tokens(decision: Decision) -> dict[str, int]:
    return {run.sequence.key: run.tokens for run in decision.runs}


requests = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.text("ab", min_size=1, max_size=20),
            "output": st.integers(1, 12),
            "priority": st.integers(0, 2),
            "start": st.integers(0, 10),
            "lag": st.sampled_from([0, 0, 1, 3]),
            "pause": st.sampled_from([None, None, (3, 5), (1, 12)]),
            "tenant": st.sampled_from("xyz"),
        }
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(
    requests,
    st.integers(0, 8),
    st.integers(1, 5),
    st.integers(1, 24),
    st.sampled_from(
        [(None,), (None,), (None, 5), (None, 1, 9, 9), (4,), (7, 20), (None, Chunked(2 * SIZE)), (Chunked(SIZE), 5)]
    ),
    st.sampled_from(SCHEDULINGS),
    st.sampled_from([None, None, 1, 5]),
)
def test_everyone_finishes_within_budget(wanted, spare, max_batch, max_tokens, windows, scheduling, chunk):
    need = Limits(SIZE, max_batch, max_tokens, windows).need(32)  # of the longest request there can be
    scheduler = make(need + spare, max_batch=max_batch, max_tokens=max_tokens, windows=windows, prefill_chunk=chunk)
    scheduler.accounts = Accounts() if scheduling == "fair" else None
    live: dict[str, Sim] = {}
    later = sorted(enumerate(wanted), key=lambda entry: entry[1]["start"])
    pauses = {f"r{index}": request["pause"] for index, request in enumerate(wanted)}
    for step in range(1500):
        while later and later[0][1]["start"] <= step:
            index, request = later.pop(0)
            prompt = request["prompt"]
            order = rank(scheduling, request["priority"], step, index)
            entry = ScheduledSequence(
                f"r{index}", order, len(prompt), len(prompt), hashes=hashes(prompt), tenant=request["tenant"]
            )
            live[entry.key] = Sim(entry, len(prompt) + request["output"], len(prompt), request["lag"])
            scheduler.add(entry)
        if not live and not later:
            break
        for key, sim in live.items():
            span = pauses[key]
            sim.sequence.paused = span is not None and span[0] <= step < span[0] + span[1]
            sim.age += 1
            if sim.lag:
                ready = min(sim.sequence.length, sim.prompt + sim.age // sim.lag)
                sim.sequence.parked = (
                    sim.sequence.parked and ready == sim.sequence.ready
                )  # as the engine does when input arrives
                sim.sequence.ready = ready
        decision = scheduler.next()
        runs = decision.runs
        assert sum(run.tokens for run in runs) <= max_tokens
        assert len(runs) <= max_batch
        assert all(run.tokens > 0 and run.stop <= run.sequence.ready and not run.sequence.paused for run in runs)
        assert len({run.sequence.key for run in runs}) == len(runs)
        runnable = [entry for entry in scheduler.running if entry.runnable]
        if runnable and not decision.preempt:
            assert runs, "someone could run and nobody did"
        if runnable:
            assert runnable[0] in [run.sequence for run in runs], "the first in rank was passed over"
        scheduler.apply(decision)
        for run in runs:
            entry = run.sequence
            scheduler.advance(entry, run.stop, publish=True)
            if run.stop == entry.length:
                entry.length += 1
                entry.ready = entry.length if not live[entry.key].lag else entry.ready
                if entry.length == live[entry.key].total:
                    scheduler.remove(entry)
                    del live[entry.key]
        scheduler.audit()
    assert not live, f"starved: {sorted(live)}"
    assert scheduler.pool.used == 0


def test_running_first_then_waiting_in_order_of_arrival():
    scheduler = make(100, max_batch=2)
    for index, key in enumerate("abc"):
        scheduler.add(new_sequence(key, 4, arrival=index))
    assert tokens(advance(scheduler)) == {"a": 4, "b": 4}
    assert tokens(advance(scheduler)) == {"a": 1, "b": 1}
    scheduler.remove(scheduler.running[0])
    assert tokens(advance(scheduler)) == {"b": 1, "c": 4}


def test_priority_goes_before_arrival():
    scheduler = make(100, max_batch=1)
    scheduler.add(new_sequence("late", 4, priority=1, arrival=0))
    scheduler.add(new_sequence("urgent", 4, priority=-1, arrival=1))
    assert tokens(advance(scheduler)) == {"urgent": 4}


def test_long_prefill_is_chunked_and_does_not_stall_decoding():
    scheduler = make(100, max_tokens=10)
    scheduler.add(new_sequence("chat", 2, arrival=1))
    advance(scheduler)
    scheduler.add(new_sequence("essay", 25, arrival=0))
    assert tokens(advance(scheduler)) == {"chat": 1, "essay": 9}
    assert tokens(advance(scheduler)) == {"chat": 1, "essay": 9}
    assert tokens(advance(scheduler)) == {"chat": 1, "essay": 7}


def test_latest_arrival_is_preempted_and_computed_again():
    scheduler = make(4)
    for index, key in enumerate("ab"):
        scheduler.add(new_sequence(key, 8, arrival=index))
    advance(scheduler)  # both prompts fill the pool
    decision = advance(scheduler)
    assert [victim.key for victim in decision.preempt] == ["b"]
    assert tokens(decision) == {"a": 1}
    assert scheduler.preemptions == 1
    scheduler.remove(scheduler.running[0])
    assert tokens(advance(scheduler)) == {"b": 9}  # its own token included


def test_paused_are_preempted_first_whatever_their_rank():
    scheduler = make(6, max_tokens=24)
    for index, key in enumerate("abc"):
        scheduler.add(new_sequence(key, 8, arrival=index))
    advance(scheduler)  # the three prompts fill the pool
    scheduler.running[0].paused = True
    decision = advance(scheduler)
    assert [victim.key for victim in decision.preempt] == ["a"]
    assert tokens(decision) == {"b": 1, "c": 1}


def test_a_sequence_without_its_next_row_is_not_scheduled():
    scheduler = make(100)
    entry = new_sequence("talker", 4)
    scheduler.add(entry)
    advance(scheduler)
    entry.ready = 4
    assert advance(scheduler).runs == ()
    entry.ready = 5
    assert tokens(advance(scheduler)) == {"talker": 1}


def test_shared_prefix_is_found_and_one_token_is_left_to_compute():
    scheduler = make(100)
    scheduler.add(new_sequence("a", 8, prompt="abababab"))
    advance(scheduler)
    scheduler.add(new_sequence("b", 8, prompt="abababab", serial=1))
    decision = advance(scheduler)
    [run] = [run for run in decision.runs if run.sequence.key == "b"]
    assert (run.start, run.tokens, len(run.hit[0])) == (4, 4, 1)
    assert scheduler.hit_tokens == 4


def test_a_big_one_that_waits_is_not_overtaken_for_ever():
    scheduler = make(4)
    scheduler.add(new_sequence("small", 4, arrival=0))
    advance(scheduler)
    scheduler.add(new_sequence("big", 15, arrival=1))
    scheduler.add(new_sequence("tiny", 1, arrival=2))
    assert tokens(advance(scheduler)) == {"small": 1}
    scheduler.remove(scheduler.running[0])
    assert list(tokens(advance(scheduler))) == ["big"]


def test_a_decision_is_a_value():
    pool = BlockPool(8)
    limits = Limits(SIZE, 2, 8)
    waiting = [new_sequence("a", 6)]
    decision = schedule([], waiting, pool, limits)
    assert decision == schedule([], waiting, pool, limits)
    assert decision.runs[0].allocate == 2
    assert pool.available == 8


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=6),
    st.integers(1, 300),
    st.integers(8, 300),
)
def test_a_very_long_prompt_stalls_nobody_longer_than_a_chunk(chats, chunk, max_tokens):
    """While 16,000 tokens are prefilled, each that decodes gets its token in every step, and the step is bounded."""
    scheduler = make(4200, max_batch=8, max_tokens=max_tokens, prefill_chunk=chunk)
    essay = new_sequence("essay", 16_000, arrival=-1)
    for step in range(60):
        for index, (length, start) in enumerate(chats):
            if start == step:
                scheduler.add(new_sequence(f"chat{index}", length, arrival=step, serial=index))
        if step == 5:
            scheduler.add(essay)
        decoding = [entry for entry in scheduler.running if entry.decoding]
        decision = scheduler.next()
        given = tokens(decision)
        assert all(given.get(entry.key) == 1 for entry in decoding)
        prefilled = sum(given.values()) - len(decoding)
        assert prefilled <= (chunk if decoding else max_tokens)
        if decoding and step >= 5 and essay.length - essay.computed > chunk:
            assert prefilled >= min(chunk, max_tokens - 8), "room for the prefill was not used"
        scheduler.apply(decision)
        for run in decision.runs:
            scheduler.advance(run.sequence, run.stop, publish=False)
            if run.stop == run.sequence.length:
                run.sequence.length = run.sequence.ready = run.sequence.length + 1
    scheduler.audit()


def test_prefills_share_the_chunk_beside_decodes():
    scheduler = make(100, max_tokens=40, prefill_chunk=10)
    scheduler.add(new_sequence("chat", 2))
    advance(scheduler)
    for index, key in enumerate("ab", 1):
        scheduler.add(new_sequence(key, 15, arrival=index))
    assert tokens(advance(scheduler)) == {"chat": 1, "a": 10}
    assert tokens(advance(scheduler)) == {"chat": 1, "a": 5, "b": 5}
    assert tokens(advance(scheduler)) == {"chat": 1, "a": 1, "b": 10}
    scheduler.add(new_sequence("c", 30, arrival=3))
    for entry in list(scheduler.running):
        scheduler.remove(entry)
    assert tokens(advance(scheduler)) == {"c": 30}  # nobody decodes
