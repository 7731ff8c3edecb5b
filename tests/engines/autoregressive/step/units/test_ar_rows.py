"""A stage model that yields rows of codes gives the rows of a plain loop, whatever happens to its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ar_adapter import HIDDEN, Driver, branch, prompts, stage_request
from ar_rows import GROUPS, ConditionedRowAdapter, RowAdapter, codes, plain_rows, rows_driver
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import Prompt, row_identity
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.speculation.ngram import NgramDrafter
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.engines.autoregressive.step.advance import Advance
from segue.kernels.graphs.replay import Call, Recorded
from segue.messages.errors import ConfigError, InvalidRequest, StageFailed
from segue.messages.sampling import RepetitionDetection, SamplingParams

PROMPTS = prompts(4, (5, 16, 33, 24))
TOKENS = 14
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, max_tokens=TOKENS)
WAYS = [GREEDY, SAMPLED, SAMPLED, GREEDY]


@pytest.fixture(scope="module")
def adapter() -> RowAdapter:
    return RowAdapter(seed=2)


@pytest.fixture(scope="module")
def plain(adapter) -> list[list[list[int]]]:
    """The rows of each prompt, request i with seed i."""
    answers = [
        plain_rows(adapter, prompt, TOKENS, way, seed)
        for seed, (prompt, way) in enumerate(zip(PROMPTS, WAYS, strict=True))
    ]
    assert all(len({tuple(row[1:]) for row in rows}) > TOKENS // 2 for rows in answers), "the codes do not change"
    return answers


def start(drive: Driver, index: int, **fields: Any) -> str:
    name = fields.pop("name", f"r{index}")
    drive.add(stage_request(name, seed=index, sampling=fields.pop("sampling", WAYS[index]), **fields), PROMPTS[index])
    return name


def test_alone(adapter, plain):
    for index, rows in enumerate(plain):
        drive = rows_driver(adapter)
        name = start(drive, index)
        drive.run()
        assert codes(drive, name) == rows


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_tokens_per_step": 7, "prefill_chunk": 5},
        {"num_blocks": 9},
        {"max_batch": 2},
        {"prefix_caching": False},
    ],
    ids=["together", "chunks", "preempted", "in turns", "unshared"],
)
def test_together(adapter, plain, config, ahead):
    drive = rows_driver(adapter, ahead=ahead, **config)
    names = [start(drive, index) for index in range(4)]
    drive.run()
    assert [codes(drive, name) for name in names] == plain
    assert (drive.engine.stats()["preemptions_total"] > 0) == ("num_blocks" in config)


def test_a_step_is_dispatched_before_the_rows_before_it_are_known(adapter, plain):
    drive = rows_driver(adapter, ahead=True)
    name = start(drive, 1)
    adapter.forwards.clear()
    given, dispatched = [], []
    while drive.engine.has_work():
        given.append(sum(len(output.codes) for output in drive.step()))
        dispatched.append(len(adapter.forwards))
    assert given == [0] + [1] * TOKENS
    assert dispatched == [*range(1, TOKENS + 1), TOKENS]
    assert codes(drive, name) == plain[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_after_every_row(adapter, plain, ahead):
    """At each row another request takes all blocks; the rows before it are computed again from their codes."""
    drive = rows_driver(adapter, ahead=ahead, num_blocks=6, prefix_caching=False)
    for when in range(1, TOKENS - 1):
        drive.results.clear()
        name = start(drive, 1)
        while name not in drive.results or len(drive.results[name].token_ids) < when:
            drive.step()
        drive.engine.pause(name)
        drive.add(stage_request("long", sampling=SamplingParams(temperature=0.0, max_tokens=2)), prompts(1, (40,))[0])
        while "long" not in drive.results:
            drive.step()
        drive.engine.resume(name)
        drive.run()
        assert drive.engine.stats()["preemptions_total"] == when
        assert codes(drive, name) == plain[1]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("index", [1, 3])
def test_resumed_after_every_row(adapter, plain, index, ahead):
    """What the journal holds is emitted again, and the rest is what it would have been."""
    drive = rows_driver(adapter, ahead=ahead, num_blocks=200)
    for known in range(TOKENS + 1):
        start(drive, index, name=f"after {known}", resume=[list(row) for row in plain[index][:known]])
    drive.run()
    assert [codes(drive, f"after {known}") for known in range(TOKENS + 1)] == [plain[index]] * (TOKENS + 1)


def test_a_journalled_row_is_taken_as_it_is(adapter, plain):
    """Not drawn again: the last row of the journal need not be what this attempt would draw."""
    known = [list(row) for row in plain[1][:5]]
    known[-1] = [known[-1][0], *((code + 1) % 31 for code in known[-1][1:])]
    drive = rows_driver(adapter)
    name = start(drive, 1, resume=known)
    drive.run()
    assert codes(drive, name)[:5] == known
    assert codes(drive, name)[5:] != plain[1][5:]


def test_seeds(adapter, plain):
    drive = rows_driver(adapter)
    for seed in (1, 1, 7):
        name = f"s{len(drive.results)}"
        drive.add(stage_request(name, seed=seed, sampling=SAMPLED), PROMPTS[1])
        drive.run()
    one, same, other = (codes(drive, f"s{number}") for number in range(3))
    assert one == same == plain[1]
    assert other != one


@pytest.mark.parametrize("ahead", [False, True])
def test_several_outputs(adapter, ahead):
    alone = [plain_rows(adapter, PROMPTS[2], TOKENS, SAMPLED, seed) for seed in (5, 6)]
    drive = rows_driver(adapter, ahead=ahead)
    two = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, max_tokens=TOKENS, n=2)
    drive.add(stage_request("it", seed=5, sampling=two), PROMPTS[2])
    drive.run()
    assert [codes(drive, branch("it", index)) for index in range(2)] == alone
    drive = rows_driver(adapter, ahead=ahead)
    drive.add(stage_request("it", seed=5, sampling=two, resume=alone[0][:3], resume_others=[alone[1][:6]]), PROMPTS[2])
    drive.run()
    assert [codes(drive, branch("it", index)) for index in range(2)] == alone


def test_a_prompt_of_generated_rows_hits_their_blocks(adapter, plain):
    """A block of generated tokens is shared if the whole rows are equal, not only their first codes."""
    drive = rows_driver(adapter)
    drive.run()
    start(drive, 2)
    drive.run()
    rows = plain[2]
    length = len(PROMPTS[2]) + TOKENS
    base = adapter.embed(torch.tensor(PROMPTS[2]), None).detach()

    def ask(name: str, known: list[list[int]]) -> int:
        embeds = torch.cat([base, adapter.embed(torch.tensor(known), None).detach()])
        identity = [*PROMPTS[2], *map(row_identity, known)]
        prompt = Prompt([*PROMPTS[2], *(row[0] for row in known)], embeds=embeds, identity=identity)
        drive.add(stage_request(name, sampling=SamplingParams(temperature=0.0, max_tokens=1)), prompt)
        return drive.run()[name].outputs[0].cached_tokens

    # the last token's row is never computed
    assert ask("same", rows) == (length - 1) // 8 * 8
    changed = [list(row) for row in rows]
    changed[3][2] = (changed[3][2] + 1) % 31
    assert ask("changed", changed) == (len(PROMPTS[2]) + 3) // 8 * 8


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("config", [{}, {"max_tokens_per_step": 6}, {"num_blocks": 8}])
def test_driven_by_another_stage(config, ahead):
    """Conditioning arrives in pieces: one row of it is added to each row's embedding."""
    adapter = ConditionedRowAdapter(seed=4)
    conditioning = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(8))
    tail = conditioning[-1]
    expected = [
        plain_rows(adapter, PROMPTS[index], TOKENS, WAYS[index], index, rows=conditioning) for index in range(3)
    ]
    assert expected[1] != plain_rows(adapter, PROMPTS[1], TOKENS, WAYS[1], 1)
    drive = rows_driver(adapter, ahead=ahead, **config)
    for index in range(3):
        drive.engine.add(stage_request(f"r{index}", seed=index, sampling=WAYS[index], resume=expected[index][:index]))
        drive.engine.feed(f"r{index}", "up", {"prompt": Prompt(PROMPTS[index])}, final=False)
    for begin in range(0, TOKENS - 1, 4):
        for index in range(3):
            drive.engine.feed(
                f"r{index}", "up", {"rows": conditioning[begin : min(begin + 4, TOKENS - 1)]}, final=False
            )
            drive.step()
    for index in range(3):
        drive.engine.feed(f"r{index}", "up", {"tail": tail}, final=True)
    drive.run()
    assert [codes(drive, f"r{index}") for index in range(3)] == expected


def test_the_network_of_the_other_codes_runs_once_per_step():
    adapter = RowAdapter(seed=2)
    adapter.recordable = False
    drive = rows_driver(adapter, max_tokens_per_step=200)
    for index in range(4):
        start(drive, index)
    drive.run()
    assert adapter.advances == [4] * TOKENS


def test_nan_of_one_is_nobody_elses(adapter, plain):
    adapter.poisoned_code = poison = plain[1][4][0]
    try:
        drive = rows_driver(adapter)
        names = [start(drive, index) for index in range(4)]
        drive.run()
    finally:
        adapter.poisoned_code = None
    for name, rows in zip(names, plain, strict=True):
        place = next((at for at, row in enumerate(rows) if row[0] == poison), None)
        error = drive.results[name].last.error
        assert isinstance(error, StageFailed) if place is not None else error is None
        assert codes(drive, name) == rows[:place]
    assert isinstance(drive.results["r1"].last.error, StageFailed)
    assert any(drive.results[name].last.error is None for name in names)


def test_repetition_is_of_whole_rows(adapter):
    """The first codes of two rows may be equal where the rows are not."""
    only: dict[str, Any] = {"temperature": 1.0, "max_tokens": TOKENS, "allowed_token_ids": [3]}
    watched = SamplingParams(**only, repetition_detection=RepetitionDetection(max_pattern_size=1, min_count=2))
    drive = rows_driver(adapter)
    drive.add(stage_request("free", sampling=SamplingParams(**only)), PROMPTS[0])
    drive.add(stage_request("watched", sampling=watched), PROMPTS[0])
    drive.run()
    rows = codes(drive, "free")
    assert {row[0] for row in rows} == {3}
    until = next((at + 1 for at in range(1, TOKENS) if rows[at] == rows[at - 1]), TOKENS)
    assert until > 2
    assert codes(drive, "watched") == rows[:until]


class EndingAdapter(RowAdapter):
    """Outputs end with one row."""

    last: list[int]

    def ends(self, row: Sequence[int]) -> bool:
        return list(row) == self.last


@pytest.mark.parametrize("ahead", [False, True])
def test_a_whole_row_ends_an_output(plain, ahead):
    """Its code 0 alone does not."""
    adapter = EndingAdapter(seed=2)
    place = next(at for at, row in enumerate(plain[1]) if at > 3 and row not in plain[1][:at])
    ways = {
        "another row": ([plain[1][place][0], *plain[1][0][1:]], SAMPLED, TOKENS, "length"),
        "ends": (plain[1][place], SAMPLED, place + 1, "stop"),
        "not before": (plain[1][place], SamplingParams(min_tokens=place + 2).over(SAMPLED), TOKENS, "length"),
        "ignored": (plain[1][place], SamplingParams(ignore_eos=True).over(SAMPLED), TOKENS, "length"),
    }
    for name, (last, sampling, count, finish) in ways.items():
        adapter.last = last
        drive = rows_driver(adapter, ahead=ahead)
        start(drive, 1, name=name, sampling=sampling)
        drive.run()
        assert codes(drive, name) == plain[1][:count], name
        assert drive.results[name].outputs[-1].finish_reason == finish


def test_replayed_calls_give_the_same(plain):
    """On a CPU, calls are recorded; more sequences than were recorded at the start come and go."""
    adapter = RowAdapter(seed=2)
    drive = rows_driver(adapter)
    drive.engine.warm_up()
    for _ in range(4):
        drive.results.clear()
        names = [start(drive, index) for index in range(4)]
        adapter.advances.clear()
        drive.run()
        assert [codes(drive, name) for name in names] == plain
    assert not adapter.advances, "calls were not replayed"


class Again:
    """Records by calling the function again over fixed inputs, as a CUDA graph computes over fixed addresses."""

    held_bytes = 0
    most = 2

    def held(self, run: Callable[[], Any]) -> tuple[Any, int]:
        return run(), 0

    def record(self, call: Call, given: Sequence[torch.Tensor]) -> tuple[Recorded, Any]:
        inputs = [tensor.clone() for tensor in given]
        made = call(inputs)

        def run() -> None:
            for fixed, tensor in zip(made, call(inputs), strict=True):
                fixed.copy_(tensor)

        recorded = Recorded(inputs, run, made)
        return recorded, recorded(given)


def test_padded_to_the_sizes_captured_at_the_start(plain):
    adapter = RowAdapter(seed=2)
    drive = rows_driver(adapter)
    advance = Advance(adapter, adapter.device, 8, Again(), padded=True)
    drive.engine.resources.dispatcher.advance = advance
    advance.warm_up(torch.ones(1, HIDDEN))
    adapter.advances.clear()
    for _ in range(2):
        drive.results.clear()
        names = [start(drive, index) for index in range(3)]
        drive.run()
        assert [codes(drive, name) for name in names] == plain[:3]
    assert set(adapter.advances) == {4}, "three rows run as four; nothing is recorded while requests wait"


def test_batch_invariant_rows(adapter):
    """`deterministic`: in tiles of 16 rows, whatever else is in the step."""
    alone = []
    for index in range(4):
        drive = rows_driver(adapter, deterministic=True)
        name = start(drive, index)
        drive.run()
        alone.append(codes(drive, name))
    drive = rows_driver(adapter, deterministic=True, max_tokens_per_step=24)
    names = [start(drive, index) for index in range(4)]
    drive.run()
    assert [codes(drive, name) for name in names] == alone


def test_what_rows_do_not_support_is_refused(adapter):
    drive = rows_driver(adapter)
    with pytest.raises(InvalidRequest, match="beam_width is 2, but stage 'main' yields rows of codes"):
        start(drive, 0, sampling=SamplingParams(beam_width=2, max_tokens=4))
    with pytest.raises(ConfigError, match="yields rows of codes, which have no drafts"):
        AutoregressiveEngine(
            adapter, AutoregressiveConfig(num_blocks=64, block_size=8), None, Speculation(NgramDrafter(1, 3), 3)
        )


ALONE: dict[tuple[int, int, bool], list[list[int]]] = {}


def alone(adapter: RowAdapter, prompt: int, seed: int, sampled: bool) -> list[list[int]]:
    key = (prompt, seed, sampled)
    if key not in ALONE:
        ALONE[key] = plain_rows(adapter, PROMPTS[prompt], TOKENS, SAMPLED if sampled else GREEDY, seed)
    return ALONE[key]


CASES = st.tuples(
    st.integers(0, 3), st.integers(0, 2), st.booleans(), st.integers(0, TOKENS), st.integers(0, 6), st.integers(0, 20)
)
"""prompt, seed, sampled, rows in the journal, arrival, paused from this step on for 4"""


@settings(max_examples=40, deadline=None)
@given(
    wanted=st.lists(CASES, min_size=1, max_size=6),
    size=st.sampled_from([8, 3, 1]),
    tokens=st.sampled_from([4, 7, 200]),
    spare=st.sampled_from([0, 2, 200]),
    ahead=st.booleans(),
    caching=st.booleans(),
)
def test_each_gets_what_it_gets_alone(adapter, wanted, size, tokens, spare, ahead, caching):
    longest = max(len(PROMPTS[prompt]) for prompt, *_ in wanted) + TOKENS
    config = {"num_blocks": -(-longest // size) + 1 + spare, "block_size": size, "max_tokens_per_step": tokens}
    drive = rows_driver(adapter, ahead=ahead, prefix_caching=caching, **config)
    for now in range(30):
        for number, (prompt, seed, sampled, known, arrival, pause) in enumerate(wanted):
            name = f"r{number}"
            if arrival == now:
                params = SAMPLED if sampled else GREEDY
                journal = [list(row) for row in alone(adapter, prompt, seed, sampled)[:known]]
                drive.add(stage_request(name, seed=seed, sampling=params, resume=journal), PROMPTS[prompt])
            if arrival <= now:
                (drive.engine.pause if pause <= now < pause + 4 else drive.engine.resume)(name)
        drive.step()
    drive.run()
    for number, (prompt, seed, sampled, *_rest) in enumerate(wanted):
        assert codes(drive, f"r{number}") == alone(adapter, prompt, seed, sampled)
    assert drive.engine.stats()["blocks_used"] == 0
    assert all(len(row) == GROUPS for result in drive.results.values() for out in result.outputs for row in out.codes)
