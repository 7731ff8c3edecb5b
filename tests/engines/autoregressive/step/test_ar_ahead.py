"""A step dispatched before the previous one completes gives what it gives after it: the same code as on a device that
runs beside the host, here on one that does not."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from ar_adapter import ConditionedAdapter, Driver, Result, TinyAdapter, prompts, stage_request, tiny_model
from ar_windowed import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ar_mixed import HOUSES, MIXED, Case, House, SeenWords, cases, serve_and_compare
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import Prompt
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.messages.errors import StageFailed
from segue.messages.sampling import SamplingParams

TEXT = frozenset({"text"})
PROMPTS = prompts(6, (5, 17, 33, 9, 24, 40))
SIZES = {"num_blocks": 200, "block_size": 8}


@pytest.fixture(scope="module")
def adapter() -> TinyAdapter:
    return TinyAdapter(tiny_model("qwen2", seed=0))


@pytest.fixture
def fragile(adapter):
    """It can be made to fail, and to give NaN for a token."""
    yield adapter
    adapter.fail_next, adapter.poison = False, None


def driver(adapter: TinyAdapter, *, ahead: bool, **config: Any) -> Driver:
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**{**SIZES, **config}), ahead=ahead))


def sampling(index: int, **changes: Any) -> SamplingParams:
    values = {"temperature": (0.0, 1.0)[index % 2], "top_p": 0.9, "max_tokens": 5 + 2 * index, **changes}
    return SamplingParams(**values)


def serve(adapter: TinyAdapter, *, ahead: bool, changes: dict[str, Any] | None = None, **config: Any) -> Driver:
    """All prompts, each drawn in its way."""
    drive = driver(adapter, ahead=ahead, **config)
    for index, prompt in enumerate(PROMPTS):
        params = sampling(index, **(changes or {}))
        drive.add(stage_request(f"r{index}", seed=index, sampling=params, to_client=TEXT), prompt)
    return drive


def said(results: dict[str, Result]) -> dict[str, Any]:
    return {
        name: (result.token_ids, result.text, result.last.finish_reason, result.last.stop_reason)
        for name, result in results.items()
    }


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_tokens_per_step": 8, "prefill_chunk": 5},
        {"num_blocks": 9},
        {"max_batch": 2},
        {"prefix_caching": False, "scheduling": "fair"},
    ],
    ids=["together", "chunks", "preempted", "in turns", "unshared"],
)
def test_ahead_gives_the_same(adapter, config):
    expected = serve(adapter, ahead=False, **config)
    drive = serve(adapter, ahead=True, **config)
    assert said(drive.run()) == said(expected.run())
    stats = drive.engine.stats()
    assert stats["blocks_used"] == 0
    assert (stats["preemptions_total"] > 0) == (config.get("num_blocks") == 9)
    assert stats["generated_tokens_total"] == expected.engine.stats()["generated_tokens_total"]


def test_the_next_step_is_launched_before_the_last_has_landed(adapter):
    drive = driver(adapter, ahead=True)
    drive.add(stage_request("it", sampling=sampling(0, max_tokens=4)), PROMPTS[0])
    adapter.forwards.clear()
    dispatched, given = [], []
    while drive.engine.has_work():
        given.append(sum(len(output.token_ids) for output in drive.step()))
        dispatched.append(len(adapter.forwards))
    assert given == [0, 1, 1, 1, 1]
    assert dispatched == [1, 2, 3, 4, 4], "the last token is known to be the last: nothing is computed behind it"


def test_what_ends_by_itself_costs_one_row(adapter):
    [tokens] = [result.token_ids for result in _alone(adapter, ahead=False, max_tokens=6).values()]
    for place, token in enumerate(tokens):
        stops = {"max_tokens": 6, "stop_token_ids": [token]}
        expected = _alone(adapter, ahead=False, **stops)
        got = _alone(adapter, ahead=True, **stops)
        assert said(got) == said(expected)
        count = len(got["it"].token_ids)
        assert count == tokens.index(token) + 1 <= place + 1
        assert len(adapter.forwards) == min(count + 1, 6)


@pytest.mark.parametrize("stop", ["a", "b", "ab", "xyz"])
def test_stop_strings(adapter, stop):
    changes = {"stop": [stop], "temperature": 1.0, "max_tokens": 30}
    assert said(serve(adapter, ahead=True, changes=changes).run()) == said(
        serve(adapter, ahead=False, changes=changes).run()
    )


def _alone(adapter: TinyAdapter, *, ahead: bool, **changes: Any) -> dict[str, Result]:
    drive = driver(adapter, ahead=ahead, prefix_caching=False)
    drive.add(stage_request("it", sampling=sampling(0, **changes), to_client=TEXT), PROMPTS[1])
    adapter.forwards.clear()  # those of the check at load
    return drive.run()


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"bad_words": ["a"]},
        {"prompt_logprobs": 1},
        {"beam_width": 2, "temperature": 0.0},
        {"n": 2, "best_of": 3},
    ],
    ids=["penalty", "bad words", "prompt", "beams", "best of"],
)
def test_what_needs_the_token_lands_first(adapter, changes):
    alone = {}
    for ahead in (False, True):
        drive = serve(adapter, ahead=ahead, changes=changes)
        alone[ahead] = said(drive.run())
    assert alone[True] == alone[False]


@pytest.mark.parametrize("changes", [{}, {"logprobs": 2}, {"min_tokens": 4}, {"logit_bias": {3: 2.0}}, {"n": 2}])
def test_what_does_not_need_it_goes_on(adapter, changes):
    drive = driver(adapter, ahead=True)
    drive.add(stage_request("it", sampling=sampling(1, max_tokens=12, **changes), to_client=TEXT), PROMPTS[0])
    for _ in range(4):
        drive.step()
    adapter.forwards.clear()
    given = len({(output.index, output.first_index) for output in drive.step()})
    assert given == changes.get("n", 1)
    assert drive.engine.has_work()
    assert len(adapter.forwards) == 1
    generated = len(drive.results["it"].token_ids)
    engine = drive.engine
    engine.pause("it")  # what is under way lands all the same
    outputs = drive.step()
    assert {output.first_index for output in outputs} == {generated}
    assert len(adapter.forwards) == 1
    assert not engine.has_work()
    engine.resume("it")
    whole = driver(adapter, ahead=False)
    whole.add(stage_request("it", sampling=sampling(1, max_tokens=12, **changes), to_client=TEXT), PROMPTS[0])
    assert said(drive.run()) == said(whole.run())


def test_cancelled_under_way(adapter):
    expected = said(serve(adapter, ahead=False).run())
    for when in (1, 2, 3, 6):
        drive = serve(adapter, ahead=True)
        engine = drive.engine
        for _ in range(when):
            drive.step()
        engine.cancel("r4")
        engine.cancel("r5")
        engine.audit()
        drive.results.pop("r5", None)
        # its name is free at once, whatever the device still computes for it
        drive.add(stage_request("r5", seed=5, sampling=sampling(5), to_client=TEXT), PROMPTS[5])
        got = said(drive.run())
        assert {name: got[name] for name in got if name != "r4"} == {
            name: expected[name] for name in expected if name != "r4"
        }
        assert engine.stats()["blocks_used"] == 0


def test_all_cancelled_under_way(adapter):
    drive = serve(adapter, ahead=True)
    drive.step()
    drive.step()
    for index in range(len(PROMPTS)):
        drive.engine.cancel(f"r{index}")
    assert drive.engine.has_work(), "its blocks are written to"
    assert drive.engine.stats()["blocks_used"] > 0
    assert drive.step() == []
    assert drive.engine.stats()["blocks_used"] == 0
    assert not drive.engine.has_work()


@pytest.mark.parametrize("cancelled", [False, True])
def test_nan_of_one_is_nobody_elses(fragile, cancelled):
    """r5 draws a token whose state is NaN: its request fails in the step that computes it, or is cancelled before that
    step is complete. Its blocks, which others get, hold no NaN."""
    expected = serve(fragile, ahead=False).run()
    right = said(expected)
    place = 2
    drive = serve(fragile, ahead=True, num_blocks=24)
    fragile.poison = poison = expected["r5"].token_ids[place]
    spoilt = {f"r{index}" for index, prompt in enumerate(PROMPTS) if poison in [*prompt, *right[f"r{index}"][0][:-1]]}
    assert "r5" in spoilt
    failed = set()
    while drive.engine.has_work():
        for output in drive.step():
            if output.error is not None:
                assert isinstance(output.error, StageFailed)
                failed.add(output.request_id)
        # the step that computes the token is under way
        if cancelled and len(drive.results.get("r5", Result()).token_ids) == place + 1:
            drive.engine.cancel("r5")
    assert failed == spoilt - ({"r5"} if cancelled else set())
    assert {name: said(drive.results)[name] for name in right.keys() - spoilt} == {
        name: right[name] for name in right.keys() - spoilt
    }
    fragile.poison = None
    again = Driver(drive.engine)
    for index, prompt in enumerate(PROMPTS):
        request = stage_request(f"r{index}", seed=index, sampling=sampling(index), to_client=TEXT)
        again.add(request, prompt)
    assert said(again.run()) == right


def test_a_device_that_fails_with_a_step_under_way(fragile):
    expected = said(serve(fragile, ahead=False).run())
    drive = serve(fragile, ahead=True)
    for _ in range(4):
        drive.step()
    known = {name: list(result.token_ids) for name, result in drive.results.items()}
    fragile.fail_next = True
    outputs = drive.step()
    failed = [output.request_id for output in outputs if output.error is not None]
    assert failed
    for name in failed:
        # what the step before it had given comes out first
        assert drive.results[name].token_ids == expected[name][0][: len(known[name]) + 1]
    drive.run()
    assert drive.engine.stats()["blocks_used"] == 0


def test_equal_prompts_are_computed_once(adapter):
    drive = driver(adapter, ahead=True)
    for index in range(3):
        drive.add(stage_request(f"r{index}", sampling=sampling(0, max_tokens=3)), PROMPTS[5])
        drive.step()
    results = drive.run()
    assert [results[f"r{index}"].outputs[0].cached_tokens for index in range(3)] == [0, 32, 32]
    assert len({tuple(result.token_ids) for result in results.values()}) == 1


def test_a_stage_that_is_driven_by_another():
    """Rows arrive one by one, late: a step is dispatched where the row for its token is there."""
    adapter = ConditionedAdapter(tiny_model("qwen2", seed=3))
    rows = torch.randn(6, adapter.model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    got = {}
    for ahead in (False, True):
        for early in (0, 2, 6):
            drive = driver(adapter, ahead=ahead)
            engine = drive.engine
            engine.add(stage_request("it", sampling=sampling(1, max_tokens=10)))
            prompt = Prompt(PROMPTS[0])
            engine.feed("it", "input", {"prompt": prompt, "rows": rows[:early]}, final=False)
            for row in rows[early:]:
                while engine.has_work():
                    drive.step()
                engine.feed("it", "input", {"rows": row[None]}, final=False)
                drive.step()
            engine.feed("it", "input", {"tail": rows[0]}, final=True)
            got[ahead, early] = drive.run()["it"].token_ids
    assert len(got[False, 0]) == 10
    assert len({tuple(tokens) for tokens in got.values()}) == 1


# --- many at once ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full() -> SeenWords:
    return SeenWords(tiny_model("qwen2", seed=7, vocab_size=110))


@pytest.fixture(scope="module")
def hybrid() -> SeenWords:
    """With layers that see a window only."""
    model = tiny("gemma 3", vocab_size=110)
    kinds = model.config.layer_types
    return SeenWords(model, tuple(11 if kind == "sliding_attention" else None for kind in kinds))


@pytest.mark.nightly
@settings(MIXED, max_examples=40)
@given(house=HOUSES, wanted=st.lists(cases(), min_size=1, max_size=8), plain=st.booleans())
def test_each_gets_what_it_gets_alone(full, house, wanted, plain):
    mixed(full, house, wanted, plain=plain)


@settings(MIXED, max_examples=15)
@given(house=HOUSES, wanted=st.lists(cases(), min_size=1, max_size=8))
def test_alone_with_windows(hybrid, house, wanted):
    mixed(hybrid, house, wanted, plain=True)


def mixed(adapter: SeenWords, house: House, wanted: list[Case], *, plain: bool) -> None:
    """`plain`: without what keeps steps from being dispatched ahead."""
    if plain:
        needs_token = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "bad_words": [], "prompt_logprobs": None}
        wanted = [_plain(case, needs_token) for case in wanted]
    serve_and_compare(adapter, replace(house, drafter="none", ahead=True), wanted)


def _plain(case: Case, changes: dict[str, Any]) -> Case:
    kept = {name: value for name, value in case.sampling if name not in ("beam_width", "structured_outputs")}
    return replace(case, sampling=tuple({**kept, **changes}.items()), rows=False)


# --- what is read back -----------------------------------------------------------------------------------------------

READS = {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "is_nonzero"}
"""Calls that bring what a tensor holds to the host."""
MADE = {"tensor", "as_tensor"}
"""Calls that make tensors of Python's numbers: on a GPU each waits for all that was launched before."""
SIZED = {"nonzero", "_unique2", "unique_dim", "masked_select", "_local_scalar_dense", "bincount", "equal"}
"""Operators that wait for the device, as the host must know what they give."""


class Calls(TorchFunctionMode):
    """Counts what Python asks of tensors; but for what the library asks before a forward of its own, to choose a mask
    that is then not made (`find_packed_sequence_indices`)."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        ours = not sys._getframe(1).f_code.co_filename.endswith("masking_utils.py")
        if ours and (name in READS or name in MADE):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts operators that a device cannot just be told to run."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        chosen = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in SIZED or any(index is not None and index.dtype == torch.bool for index in chosen):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def reads(drive: Driver, steps: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    with Calls(seen), Operators(seen):
        for _ in range(steps):
            drive.engine.step()
    return seen


def test_such_reads_are_seen():
    seen: Counter[str] = Counter()
    with Calls(seen), Operators(seen):
        some = torch.arange(4)
        assert bool((some > 2).any())
        some.tolist()
        some[some > 1]
        some.nonzero()
        torch.tensor([1])
    assert seen["__bool__"] == seen["tolist"] == seen["index"] == seen["tensor"] == 1
    assert seen["nonzero"] >= 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_reads_back_once(adapter, ahead):
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"logprobs": 2, "logprob_token_ids": [4]},
        {"suppress_tokens": [5], "logit_bias": {3: 2.0}, "min_tokens": 30, "allowed_token_ids": list(range(60))},
        {"n": 2, "best_of": 3},
    ]
    drive = driver(adapter, ahead=ahead)
    for index, way in enumerate(ways):
        params = SamplingParams(max_tokens=60, **way)
        drive.add(stage_request(f"r{index}", seed=index, sampling=params, to_client=TEXT), PROMPTS[index])
    for _ in range(6):
        drive.step()
    assert drive.engine.stats()["batch"] == len(ways) + 2
    assert reads(drive, 5) == {"numpy": 5}
