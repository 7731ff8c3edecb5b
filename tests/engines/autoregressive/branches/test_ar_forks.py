"""n and best_of: one prompt, many outputs, each what a request of its own gives; blocks are shared until written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ar_adapter import ConditionedAdapter, Driver, TinyAdapter, branch, logprobs_of, prompts, stage_request, tiny_model
from ar_windowed import Windowed, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.sampling import SamplingParams

PROMPTS = prompts(3, (5, 16, 33))
TOKENS = 12
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "max_tokens": TOKENS}
TEXT = frozenset({"text"})
SEED = 2**64 - 3  # fork 3 wraps


@pytest.fixture(scope="module")
def adapter():
    return TinyAdapter(tiny_model("qwen2", seed=7))


def driver(adapter, **config) -> Driver:
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**{"num_blocks": 160, "block_size": 8, **config})))


def apart(adapter, prompt, count: int, **sampling) -> list[list[int]]:
    """What requests of their own give."""
    drive = driver(adapter)
    for index in range(count):
        params = SamplingParams(**{**SAMPLED, **sampling})
        drive.add(stage_request(f"r{index}", sampling=params, seed=(SEED + index) % 2**64), prompt)
    results = drive.run()
    return [results[f"r{index}"].token_ids for index in range(count)]


def together(drive: Driver, prompts, n: int, **sampling) -> list[list[list[int]]]:
    for number, prompt in enumerate(prompts):
        params = SamplingParams(**{**SAMPLED, "n": n, **sampling})
        drive.add(stage_request(f"it{number}", sampling=params, seed=SEED), prompt)
    results = drive.run()
    assert drive.engine.stats()["blocks_used"] == 0
    found = [[results[branch(f"it{number}", index)] for index in range(n)] for number in range(len(prompts))]
    assert all(result.last.finished for outputs in found for result in outputs)
    return [[result.token_ids for result in outputs] for outputs in found]


@pytest.fixture(scope="module")
def expected(adapter):
    answers = [apart(adapter, prompt, 8) for prompt in PROMPTS]
    assert all(len({tuple(ids) for ids in outputs}) == 8 for outputs in answers)
    return answers


@pytest.mark.parametrize(
    "config",
    [
        {"max_batch": 32},
        {"max_batch": 3},
        {"max_tokens_per_step": 8},
        {"num_blocks": 16},
        {"num_blocks": 12, "prefix_caching": False},
    ],
    ids=["at once", "few at a time", "chunked", "preempted", "preempted, nothing cached"],
)
def test_equals_requests_of_their_own(adapter, expected, config):
    drive = driver(adapter, **config)
    assert together(drive, PROMPTS, 8) == expected
    stats = drive.engine.stats()
    assert (stats["preemptions_total"] > 0) == ("num_blocks" in config)


def test_the_prompt_is_computed_once(adapter):
    drive = driver(adapter)
    together(drive, PROMPTS[2:], 8)
    assert drive.engine.stats()["prefill_tokens_total"] == 33
    counts = [(out.prompt_tokens, out.cached_tokens) for result in drive.results.values() for out in result.outputs]
    assert [count for count in counts if count != (0, 0)] == [(33, 0)]


def test_a_tenant_pays_for_the_prompt_once_and_for_every_token(adapter):
    for num_blocks in (160, 16):
        drive = driver(adapter, scheduling="fair", num_blocks=num_blocks)
        together(drive, PROMPTS[2:], 4)
        assert drive.engine.resources.scheduler.accounts is not None
        [service] = drive.engine.resources.scheduler.accounts.counters.values()
        assert service == 33 + 2 * 4 * TOKENS


def test_another_seed_gives_other_outputs(adapter, expected):
    drive = driver(adapter)
    params = SamplingParams(**SAMPLED, n=8)
    drive.add(stage_request("it", sampling=params, seed=1), PROMPTS[0])
    results = drive.run()
    assert [results[branch("it", index)].token_ids for index in range(8)] != expected[0]


@pytest.mark.parametrize("done", [(0, 0, 0), (1, 1, 1), (4, 1, 0), (0, 7, TOKENS), (TOKENS, TOKENS, TOKENS)])
def test_resumed_from_the_journal_of_each(adapter, expected, done):
    known = [ids[:count] for ids, count in zip(expected[1], done, strict=False)]
    drive = driver(adapter, max_tokens_per_step=12)
    request = stage_request("it", sampling=SamplingParams(**SAMPLED, n=3), seed=SEED, to_client=TEXT, resume=known[0])
    request.resume_others = known[1:]
    drive.add(request, PROMPTS[1])
    results = drive.run()
    for index in range(3):
        result = results[branch("it", index)]
        assert result.token_ids == expected[1][index]
        assert result.text == "".join(chr(ord("A") + token) for token in result.token_ids)


def test_outputs_end_by_themselves(adapter, expected):
    """One ends early: its blocks are free, the others go on."""
    end = expected[0][2][3]
    drive = driver(adapter)
    outputs = together(drive, PROMPTS[:1], 8, stop_token_ids=[end])[0]
    assert outputs == apart(adapter, PROMPTS[0], 8, stop_token_ids=[end])
    assert len({len(ids) for ids in outputs}) > 1
    ends = [drive.results[branch("it0", index)].last for index in range(8)]
    assert {(out.finish_reason, out.stop_reason) for out in ends} == {("stop", end), ("length", None)}


# --- best_of ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [160, 16])
def test_the_best_of_many(adapter, expected, num_blocks):
    drive = driver(adapter, num_blocks=num_blocks)
    found = together(drive, PROMPTS, 3, best_of=8)
    for prompt, outputs, all_of_them in zip(PROMPTS, found, expected, strict=True):
        ranked = sorted(all_of_them, key=lambda ids: -float(logprobs_of(adapter.model, prompt, ids).mean()))
        assert outputs == ranked[:3]
        assert outputs != all_of_them[:3]
    for number, prompt in enumerate(PROMPTS):
        first, *others = drive.results[f"it{number}"].outputs
        assert (first.prompt_tokens, first.token_ids) == (len(prompt), [])
        [last] = [out for out in others if out.token_ids]
        score = last.cumulative_logprob / len(last.token_ids)
        assert score == pytest.approx(float(logprobs_of(adapter.model, prompt, last.token_ids).mean()), abs=1e-4)


# --- memory ----------------------------------------------------------------------------------------------------------


def most_blocks(drive: Driver) -> int:
    """The pool's own counts at their fullest."""
    most = 0
    while drive.engine.has_work():
        drive.step()
        most = max(most, int(drive.engine.stats()["blocks_used"]))
    return most


def test_eight_outputs_of_a_long_prompt_share_their_memory():
    """512 tokens of prompt, 64 of output: at least 55% fewer blocks than copies (PagedAttention, Kwon et al., 2023,
    §6.3, has 55% as its best figure for beam search)."""
    adapter = TinyAdapter(tiny_model("qwen2", max_position_embeddings=1024), max_model_len=1024)
    [prompt] = prompts(1, [512])
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 64}
    config: dict[str, Any] = {"num_blocks": 400, "block_size": 16, "prefix_caching": False}
    copies = driver(adapter, **config)
    for index in range(8):
        copies.add(stage_request(f"r{index}", sampling=SamplingParams(**params), seed=index), prompt)
    shared = driver(adapter, **config)
    shared.add(stage_request("it", sampling=SamplingParams(**params, n=8)), prompt)
    beams = driver(adapter, **config)
    beams.add(stage_request("it", sampling=SamplingParams(beam_width=4, n=4, max_tokens=64)), prompt)
    apart, together, searching = most_blocks(copies), most_blocks(shared), most_blocks(beams)
    assert apart == 8 * 36  # 575 tokens are in the cache
    assert together == 32 + 8 * 4
    assert together <= 0.45 * apart
    assert searching <= 32 + 4 * 4
    for index in range(8):
        assert copies.results[f"r{index}"].token_ids == shared.results[branch("it", index)].token_ids


def test_a_shared_block_is_copied_when_it_is_written_to(adapter):
    """The prompt ends within a block: all forks hold it, then all but one have their own."""
    drive = driver(adapter, prefix_caching=False, max_batch=8)
    drive.add(stage_request("it", sampling=SamplingParams(**SAMPLED, n=4), seed=SEED), PROMPTS[0])
    drive.step()
    assert drive.engine.stats()["blocks_used"] == 1
    drive.step()
    assert drive.engine.stats()["blocks_used"] == 4


def test_captured_rows_are_copied_with_their_block():
    """Blocks that a fork filled hold the captured rows of the prompt's end, too: who finds them is given those."""
    adapter = TinyAdapter(tiny_model("qwen2", seed=7), capture=True)
    drive = driver(adapter, max_batch=8)
    outputs = together(drive, PROMPTS[:1], 4)[0]
    for number, ids in enumerate(outputs):
        longer = [*PROMPTS[0], *ids[:-1], 3]
        params = SamplingParams(temperature=0.0, max_tokens=2)
        down = frozenset({"talker"})
        drive.add(stage_request(f"hit{number}", sampling=params, downstreams=down), longer)
        hit = drive.run()[f"hit{number}"]
        assert hit.outputs[0].cached_tokens == 16
        fresh = driver(adapter)
        fresh.add(stage_request("it", sampling=params, downstreams=down), longer)
        torch.testing.assert_close(hit.rows(), fresh.run()["it"].rows(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["mistral", "mistral, two tokens", "gemma 3"])
def test_layers_with_windows(kind):
    """Each group of layers has its own table, and its own copy of the last block."""
    adapter = Windowed(tiny(kind))
    small = driver(adapter).engine.resources.scheduler.limits.need(33 + TOKENS)
    for prompt in PROMPTS:
        answers = apart(adapter, prompt, 4)
        assert together(driver(adapter), [prompt], 4) == [answers]
        squeezed = driver(adapter, num_blocks=small + 8, prefix_caching=False, max_tokens_per_step=16)
        assert together(squeezed, [prompt], 4) == [answers]


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_log_probabilities_of_each_output(adapter):
    drive = driver(adapter)
    asked = SamplingParams(**SAMPLED, n=3, logprobs=2, prompt_logprobs=1)
    drive.add(stage_request("it", sampling=asked, seed=SEED, to_client=TEXT), PROMPTS[1])
    results = drive.run()
    for index in range(3):
        result = results[branch("it", index)]
        told = [one.chosen for out in result.outputs for one in out.logprobs]
        assert [one.token_id for one in told] == result.token_ids
        assert result.last.cumulative_logprob == pytest.approx(sum(one.logprob for one in told))
        of_prompt = [out.prompt_logprobs for out in result.outputs if out.prompt_logprobs]
        assert [len(one) for one in of_prompt] == ([16] if index == 0 else [])


def test_log_probabilities_of_the_best(adapter):
    drive = driver(adapter)
    asked = SamplingParams(**SAMPLED, n=2, best_of=5, logprobs=0, prompt_logprobs=1)
    drive.add(stage_request("it", sampling=asked, seed=SEED, to_client=TEXT), PROMPTS[1])
    results = drive.run()
    for index in range(2):
        result = results[branch("it", index)]
        assert [one.chosen.token_id for one in result.last.logprobs] == result.token_ids
        assert len(result.last.prompt_logprobs) == (16 if index == 0 else 0)


# --- what does not go ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "field"),
    [({"n": 3}, "n"), ({"best_of": 4}, "best_of"), ({"beam_width": 4}, "beam_width")],
)
def test_a_stage_that_feeds_another_has_one_output(adapter, sampling, field):
    request = stage_request("it", sampling=SamplingParams(**sampling), downstreams=frozenset({"talker"}))
    with pytest.raises(
        InvalidRequest, match=rf"sampling\.main\.{field} is \d, but stage 'main' feeds talker"
    ) as caught:
        driver(adapter).engine.add(request)
    assert caught.value.field == f"sampling.main.{field}"


def test_a_stage_that_is_driven_by_another_has_one_output():
    adapter = ConditionedAdapter(tiny_model("qwen2"))
    with pytest.raises(InvalidRequest, match="conditioned on other stages"):
        driver(adapter).engine.add(stage_request("it", sampling=SamplingParams(n=2)))


def test_a_failure_is_that_of_the_whole_request(adapter, expected):
    poisoned = TinyAdapter(adapter.model)
    poisoned.poison = expected[0][5][4]
    assert poisoned.poison not in PROMPTS[0]
    drive = driver(poisoned, max_batch=32)
    drive.add(stage_request("bad", sampling=SamplingParams(**SAMPLED, n=8), seed=SEED), PROMPTS[0])
    drive.run()
    errors = [out for result in drive.results.values() for out in result.outputs if out.error]
    assert len(errors) == 1
    assert isinstance(errors[0].error, StageFailed)
    assert drive.engine.stats()["blocks_used"] == 0
    poisoned.poison = None
    drive.results.clear()
    assert together(drive, PROMPTS[:1], 8) == expected[:1]


# --- any order of events ---------------------------------------------------------------------------------------------

asked = st.fixed_dictionaries(
    {
        "prompt": st.integers(0, 2),
        "kind": st.sampled_from(["one", "n", "best_of", "beams"]),
        "width": st.integers(2, 4),
        "priority": st.integers(0, 2),
        "start": st.integers(0, 6),
        "cancel": st.sampled_from([None, None, None, 2, 5, 9]),
        "pause": st.sampled_from([None, None, (1, 4), (3, 6)]),
    }
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(asked, min_size=1, max_size=5), st.integers(16, 40), st.integers(4, 9), st.integers(6, 40), st.booleans()
)
def test_blocks_are_conserved_and_answers_right(small, wanted, num_blocks, max_batch, max_tokens, caching):
    """Whatever forks, is dropped, preempted, paused or cancelled: the state is right after every step (the driver
    audits them), everyone finishes, and nobody's answer changes."""
    adapter, alone = small
    drive = driver(
        adapter, num_blocks=num_blocks, max_batch=max_batch, max_tokens_per_step=max_tokens, prefix_caching=caching
    )
    ids = [f"r{index}" for index in range(len(wanted))]
    for step in range(400):
        for request_id, request in zip(ids, wanted, strict=True):
            if request["start"] == step:
                drive.add(asked_for(request_id, request), PROMPTS[request["prompt"]])
            if request["cancel"] is not None and step == request["start"] + request["cancel"]:
                drive.engine.cancel(request_id)
            if request["pause"] is not None:
                first, length = request["pause"]
                if step == request["start"] + first:
                    drive.engine.pause(request_id)
                if step == request["start"] + first + length:
                    drive.engine.resume(request_id)
        drive.engine.audit()
        if drive.engine.has_work():
            drive.step()
        elif step > 20:
            break
    assert not drive.engine.has_work()
    assert drive.engine.stats()["blocks_used"] == 0
    for request_id, request in zip(ids, wanted, strict=True):
        results = [drive.results.get(branch(request_id, index)) for index in range(shown(request))]
        finished = [result for result in results if result is not None and result.last.finished]
        assert len(finished) == len(results) or request["cancel"] is not None
        key = (request["prompt"], request["kind"], request["width"])
        for index, result in enumerate(results):
            if result is not None and result.last.finished:
                assert result.token_ids == alone(key)[index]


def shown(request: dict[str, Any]) -> int:
    return {"one": 1, "n": request["width"], "best_of": 2, "beams": request["width"]}[request["kind"]]


def asked_for(request_id: str, request: dict[str, Any]):
    params: dict[str, Any] = {"max_tokens": 6, "n": shown(request), "temperature": 1.0}
    if request["kind"] == "best_of":
        params["best_of"] = request["width"] + 1
    if request["kind"] == "beams":
        params.update(beam_width=request["width"], temperature=0.0)
    return stage_request(request_id, sampling=SamplingParams(**params), seed=5, priority=request.get("priority", 0))


@pytest.fixture(scope="module")
def small(adapter):
    """The adapter, and what each kind of request gives where it is alone."""
    known: dict[tuple[int, str, int], list[list[int]]] = {}

    def alone(key: tuple[int, str, int]) -> list[list[int]]:
        if key not in known:
            request = dict(zip(("prompt", "kind", "width"), key, strict=True))
            drive = driver(adapter)
            drive.add(asked_for("it", request), PROMPTS[key[0]])
            results = drive.run()
            known[key] = [results[branch("it", index)].token_ids for index in range(shown(request))]
        return known[key]

    return adapter, alone
