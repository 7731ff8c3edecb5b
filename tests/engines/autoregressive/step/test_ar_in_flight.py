"""Equal prompts that arrive together are computed once, and nobody waits for ever."""

from __future__ import annotations

from ar_adapter import Driver, TinyAdapter, generate, prompts, stage_request, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.cache.blocks import ROOT, BlockPool, block_hash, common
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.schedule.decision import Decision, Limits, ScheduledSequence
from segue.engines.autoregressive.schedule.scheduler import Scheduler
from segue.kernels.attention.interface import Chunked
from segue.messages.sampling import SamplingParams

SIZE = 16


def chain(prompt: str, size: int = SIZE) -> list[bytes]:
    keys = [ROOT]
    for start in range(0, len(prompt) - size + 1, size):
        keys.append(block_hash(keys[-1], prompt[start : start + size].encode()))
    return keys[1:]


def scheduled(key: str, prompt: str, serial: int, *, priority: int = 0) -> ScheduledSequence:
    return ScheduledSequence(key, (priority, serial, serial), len(prompt), len(prompt), hashes=chain(prompt))


def make(num_blocks: int = 400, max_tokens: int = 2048, windows=(None,)) -> Scheduler:
    return Scheduler(BlockPool(num_blocks), Limits(SIZE, 32, max_tokens, windows))


def step(scheduler: Scheduler) -> Decision:
    decision = scheduler.next()
    assert decision == scheduler.next()
    scheduler.apply(decision)
    for run in decision.runs:
        scheduler.advance(run.sequence, run.stop, publish=True)
        if run.stop == run.sequence.length:
            run.sequence.length = run.sequence.ready = run.sequence.length + 1
    scheduler.audit()
    return decision


def tokens(decision: Decision) -> dict[str, int]:
    return {run.sequence.key: run.tokens for run in decision.runs}


def test_eight_equal_prompts_take_less_than_half_the_memory():
    """The allocator's counts, at n = 8 and 512 tokens: at least 55% below separate copies."""
    scheduler = make()
    for index in range(8):
        scheduler.add(scheduled(f"r{index}", "x" * 512, index))
    computed = 0
    for _ in range(12):
        computed += sum(tokens(step(scheduler)).values())
    assert len(scheduler.running) == 8
    separate = sum(scheduler.limits.blocks(entry.computed) for entry in scheduler.running)
    assert separate == sum(len(entry.blocks) for entry in scheduler.running)
    assert scheduler.pool.used <= 0.45 * separate
    assert scheduler.pool.used == 31 + 2 * 8  # 31 shared; each computes its last block, and has begun another
    assert computed < 512 + 8 * (SIZE + 12)


def test_a_long_common_prefix_is_waited_for_chunk_by_chunk():
    scheduler = make(max_tokens=32)
    scheduler.add(scheduled("first", "x" * 96 + "a" * 20, 0))
    scheduler.add(scheduled("second", "x" * 96 + "b" * 20, 1))
    scheduler.add(scheduled("other", "z" * 8, 2))
    assert tokens(step(scheduler)) == {"first": 32}
    assert tokens(step(scheduler)) == {"first": 32}
    assert tokens(step(scheduler)) == {"first": 32}
    # what they share is there now: from here on they run side by side
    assert tokens(step(scheduler)) == {"first": 20, "second": 12}
    assert scheduler.hit_tokens == 96
    assert tokens(step(scheduler)) == {"first": 1, "second": 8, "other": 8}


def test_others_are_not_held_up():
    scheduler = make()
    for index, prompt in enumerate(("x" * 100, "x" * 100, "y" * 40)):
        scheduler.add(scheduled(f"r{index}", prompt, index))
    assert tokens(step(scheduler)) == {"r0": 100, "r2": 40}
    assert tokens(step(scheduler)) == {"r0": 1, "r1": 4, "r2": 1}


def test_a_place_is_kept_for_those_who_wait():
    """A later one does not take the blocks that the waiting one will need."""
    scheduler = make(num_blocks=10)
    for index, prompt in enumerate(("x" * 96, "x" * 96, "y" * 40)):
        scheduler.add(scheduled(f"r{index}", prompt, index))
    assert tokens(step(scheduler)) == {"r0": 96, "r2": 40}
    scheduler = make(num_blocks=9)
    for index, prompt in enumerate(("x" * 96, "x" * 96, "y" * 40)):
        scheduler.add(scheduled(f"r{index}", prompt, index))
    assert tokens(step(scheduler)) == {"r0": 96}


def test_nobody_waits_for_one_that_does_not_get_on():
    scheduler = make(max_tokens=32)
    scheduler.add(scheduled("first", "x" * 96, 0))
    scheduler.add(scheduled("second", "x" * 96, 1))
    step(scheduler)
    scheduler.running[0].paused = True
    assert tokens(step(scheduler)) == {"second": 32}
    scheduler.running[0].paused = False
    assert tokens(step(scheduler)) == {"first": 31, "second": 1}


def test_nobody_of_higher_priority_waits():
    scheduler = make(max_tokens=64)
    scheduler.add(scheduled("low", "x" * 200, 0, priority=1))
    step(scheduler)
    scheduler.add(scheduled("high", "x" * 200, 1))
    assert set(tokens(step(scheduler))) == {"low"}  # 64 tokens were left to it: running ones come first
    assert scheduler.running[0].key == "low"
    scheduler.running[0].paused = True
    assert tokens(step(scheduler)) == {"high": 64}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.text("xy", max_size=3), st.integers(1, 60), st.integers(0, 6)), min_size=1, max_size=10),
    st.integers(0, 8),
    st.integers(1, 80),
    st.sampled_from([(None,), (None, 40), (20,), (None, Chunked(2 * SIZE))]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20))),
)
def test_everyone_finishes(wanted, spare, max_tokens, windows, pauses):
    """Prompts with common beginnings, pauses at any time, little room."""
    scheduler = make(1, max_tokens, windows)
    longest = max(3 * SIZE + tail + 8 for _, tail, _ in wanted)
    scheduler.pool = BlockPool(scheduler.limits.need(longest) + spare)
    ends = {}
    live: dict[str, ScheduledSequence] = {}
    for now in range(1000):
        for index, (head, tail, start) in enumerate(wanted):
            if start == now:
                prompt = "".join(letter * SIZE for letter in head) + "z" * tail
                live[f"r{index}"] = scheduled(f"r{index}", prompt, index)
                ends[f"r{index}"] = len(prompt) + 5
                scheduler.add(live[f"r{index}"])
        for index, span in pauses:
            if f"r{index}" in live:
                live[f"r{index}"].paused = now < span
        step(scheduler)
        for key in [key for key, entry in live.items() if entry.length >= ends[key]]:
            scheduler.remove(live.pop(key))
        if now > 6 and not live:
            return
    raise AssertionError(f"starved: {sorted(live)}")


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_common_beginning_of_two_chains(one, other):
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    assert common(chain(one, 1), chain(other, 1)) == same


def test_the_engine_computes_equal_prompts_once():
    adapter = TinyAdapter(tiny_model())
    drive = Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(num_blocks=64, block_size=8)))
    [prompt] = prompts(1, [41])
    for index in range(6):
        drive.add(stage_request(f"r{index}", sampling=SamplingParams(temperature=0.0, max_tokens=6)), prompt)
    results = drive.run()
    assert drive.engine.stats()["prefill_tokens_total"] == 41 + 5 * 1
    assert [results[f"r{index}"].token_ids for index in range(6)] == [generate(adapter.model, prompt, 6)] * 6
