"""Beam search equals transformers' `generate(num_beams=…, do_sample=False)`, however it is served."""

from __future__ import annotations

import itertools

import pytest
import torch
from ar_adapter import Driver, TinyAdapter, branch, generate, logprobs_of, prompts, stage_request, tiny_model
from ar_windowed import Windowed, tiny

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.kernels.attention.paged_attention import NAME
from segue.messages.errors import InvalidRequest, StageFailed, TooLong
from segue.messages.sampling import SamplingParams

PROMPTS = prompts(4, (5, 16, 33, 24))
TOKENS = 14
ENDS = (11, 23, 40, 58, 73)
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)
TEXT = frozenset({"text"})


@pytest.fixture(scope="module")
def adapter():
    """Weights that are not too sure of themselves: beams change places, and end tokens come at different lengths."""
    model = tiny_model("qwen2", seed=3)
    with torch.no_grad():
        model.lm_head.weight *= 0.4
    return TinyAdapter(model)


def reference(adapter, prompt, width, n, *, ends=ENDS, tokens=TOKENS, **options) -> list[list[int]]:
    """The library's n best, end token included, padding cut off."""
    adapter.model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([prompt])
        out = adapter.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=width,
            num_return_sequences=n,
            max_new_tokens=tokens,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
            **options,
        )
    finally:
        adapter.model.set_attn_implementation(NAME)
    return [cut(row[len(prompt) :].tolist(), ends) for row in out]


def cut(ids: list[int], ends) -> list[int]:
    body = list(itertools.takewhile(lambda token: token not in ends, ids))
    return ids[: len(body) + 1]


def driver(adapter, **config) -> Driver:
    return Driver(
        AutoregressiveEngine(
            adapter, AutoregressiveConfig(**{"num_blocks": 160, "block_size": 8, "max_batch": 40, **config})
        )
    )


def beams(width: int, n: int, **fields) -> SamplingParams:
    return SamplingParams(**{"beam_width": width, "n": n, "max_tokens": TOKENS, "stop_token_ids": list(ENDS), **fields})


def outputs(drive: Driver, request_id: str, n: int) -> list[list[int]]:
    results = [drive.results[branch(request_id, index)] for index in range(n)]
    assert all(result.last.finished for result in results)
    return [result.token_ids for result in results]


def serve(drive: Driver, sampling: SamplingParams) -> list[list[list[int]]]:
    for index, prompt in enumerate(PROMPTS):
        drive.add(stage_request(f"r{index}", sampling=sampling), prompt)
    drive.run()
    assert drive.engine.stats()["blocks_used"] == 0
    return [outputs(drive, f"r{index}", sampling.n or 1) for index in range(len(PROMPTS))]


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.5, 2.0])
@pytest.mark.parametrize("width", [2, 4, 16])
def test_equals_the_library(adapter, width, length_penalty, early_stopping):
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    expected = [reference(adapter, prompt, width, width, **options) for prompt in PROMPTS]
    several = len({len(ids) for best in expected for ids in best}) > 2
    assert several or length_penalty > 1, "ends must come at different lengths"
    assert serve(driver(adapter), beams(width, width, **options)) == expected


def test_beams_find_what_greedy_decoding_does_not(adapter):
    """The parity above would prove little if a search were one greedy output."""
    best = [found[0] for found in serve(driver(adapter), beams(4, 1))]
    greedy = [cut(generate(adapter.model, prompt, TOKENS), ENDS) for prompt in PROMPTS]
    assert best != greedy


def test_a_changed_weight_changes_the_answer(adapter):
    other = tiny_model("qwen2", seed=3)
    with torch.no_grad():
        other.lm_head.weight *= 0.4
        other.model.layers[1].self_attn.k_proj.weight[3, 5] += 8.0
    assert serve(driver(TinyAdapter(other)), beams(4, 4)) != [reference(adapter, prompt, 4, 4) for prompt in PROMPTS]


def test_without_end_tokens(adapter):
    expected = [reference(adapter, prompt, 4, 3, ends=()) for prompt in PROMPTS]
    assert serve(driver(adapter), beams(4, 3, stop_token_ids=[])) == expected
    assert all(len(ids) == TOKENS for best in expected for ids in best)


@pytest.fixture(scope="module")
def expected(adapter):
    return [reference(adapter, prompt, 4, 4) for prompt in PROMPTS]


def test_alone(adapter, expected):
    drive = driver(adapter)
    for index, prompt in enumerate(PROMPTS):
        drive.add(stage_request("it", sampling=beams(4, 4)), prompt)
        drive.run()
        assert outputs(drive, "it", 4) == expected[index]
        drive.results.clear()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_chunked_prefill_among_others(adapter, expected, prefix_caching):
    drive = driver(adapter, max_tokens_per_step=13, max_batch=9, prefix_caching=prefix_caching)
    for index, prompt in enumerate(PROMPTS):
        drive.add(stage_request(f"b{index}", sampling=beams(4, 4)), prompt)
        drive.add(stage_request(f"g{index}", sampling=GREEDY), prompt)
    drive.run()
    assert [outputs(drive, f"b{index}", 4) for index in range(len(PROMPTS))] == expected
    greedy = [drive.results[f"g{index}"].token_ids for index in range(len(PROMPTS))]
    assert greedy == [generate(adapter.model, prompt, TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_after_preemption(adapter, expected, prefix_caching):
    drive = driver(adapter, num_blocks=17, prefix_caching=prefix_caching, max_tokens_per_step=24)
    assert serve(drive, beams(4, 4)) == expected
    assert drive.engine.stats()["preemptions_total"] > 0


def test_pushed_out_by_others_and_come_back(adapter, expected):
    """Paused in the middle of the search, so that a request takes all its blocks."""
    drive = driver(adapter, num_blocks=17)
    drive.add(stage_request("it", sampling=beams(4, 4)), PROMPTS[2])
    for _ in range(5):
        drive.step()
    drive.engine.pause("it")
    drive.add(stage_request("big", sampling=SamplingParams(temperature=0.0, max_tokens=20)), [5] * 110)
    drive.run()
    assert drive.engine.stats()["preemptions_total"] == 4
    drive.engine.resume("it")
    drive.run()
    assert outputs(drive, "it", 4) == expected[2]


def test_penalties_and_bias_as_the_library_applies_them(adapter):
    options = {"repetition_penalty": 1.4}
    bias = {7: 1.5, 40: -2.0}
    expected = [
        reference(
            adapter,
            prompt,
            4,
            4,
            min_new_tokens=5,
            sequence_bias={(token,): value for token, value in bias.items()},
            suppress_tokens=[3, 9],
            **options,
        )
        for prompt in PROMPTS
    ]
    assert expected != [reference(adapter, prompt, 4, 4) for prompt in PROMPTS]
    sampling = beams(4, 4, min_tokens=5, logit_bias=bias, suppress_tokens=[3, 9], **options)
    assert serve(driver(adapter), sampling) == expected
    assert serve(driver(adapter, num_blocks=17), sampling) == expected


def test_stop_strings(adapter):
    """A beam ends where its text has the stop string, as at an end token; the text is cut there."""
    [ids] = reference(adapter, PROMPTS[0], 4, 1, ends=())
    stop = "".join(chr(ord("A") + token) for token in ids[4:6])

    drive = driver(adapter)
    drive.add(
        stage_request("it", sampling=beams(4, 1, stop_token_ids=[], stop=[stop], early_stopping=True), to_client=TEXT),
        PROMPTS[0],
    )
    last = drive.run()["it"].last
    assert last.finished
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert stop not in last.text
    assert len(last.text) == len(last.token_ids) - 2
    # with the text of every end token as a stop string, the search is the one with end tokens
    letters = [chr(ord("A") + token) for token in ENDS]
    found = serve(driver(adapter), beams(4, 4, stop_token_ids=[], stop=letters))
    assert found == serve(driver(adapter), beams(4, 4))


def test_scores_and_reasons(adapter):
    drive = driver(adapter)
    drive.add(stage_request("it", sampling=beams(4, 4), to_client=TEXT), PROMPTS[1])
    results = drive.run()
    ends = [results[branch("it", index)].last for index in range(4)]
    scores = [end.cumulative_logprob / len(end.token_ids) for end in ends]
    assert scores == sorted(scores, reverse=True)
    for end in ends:
        assert end.cumulative_logprob == pytest.approx(
            float(logprobs_of(adapter.model, PROMPTS[1], end.token_ids).sum()), abs=1e-4
        )
        stopped = end.token_ids[-1] in ENDS
        assert (end.finish_reason, end.stop_reason) == (("stop", end.token_ids[-1]) if stopped else ("length", None))
        shown = end.token_ids[:-1] if stopped else end.token_ids
        assert end.text == "".join(chr(ord("A") + token) for token in shown)
    first, *others = results["it"].outputs
    assert (first.prompt_tokens, first.token_ids) == (16, [])
    assert len(others) == 1, "nothing is given out before the end"


def test_one_beam_is_greedy_decoding(adapter):
    [prompt] = prompts(1, [9], seed=8)
    drive = driver(adapter)
    drive.add(stage_request("it", sampling=SamplingParams(beam_width=1, max_tokens=TOKENS)), prompt)
    assert drive.run()["it"].token_ids == generate(adapter.model, prompt, TOKENS)


def test_beams_share_blocks(adapter):
    """Four beams of a long prompt hold hardly more than one sequence."""
    [prompt] = prompts(1, [200], seed=9)
    drive = driver(adapter, prefix_caching=False)
    drive.add(stage_request("it", sampling=beams(4, 4, stop_token_ids=[])), prompt)
    most = 0
    while drive.engine.has_work():
        drive.step()
        most = max(most, int(drive.engine.stats()["blocks_used"]))
    apart = 4 * -(-(200 + TOKENS - 1) // 8)
    assert most < 0.4 * apart


def test_a_search_that_cannot_fit_is_refused(adapter):
    drive = driver(adapter, num_blocks=16)
    drive.add(stage_request("it", sampling=beams(16, 1, max_tokens=80)), PROMPTS[2])
    error = drive.run()["it"].last.error
    assert isinstance(error, TooLong)
    assert error.field == "sampling.main.beam_width"
    assert "16 beams of 80 tokens" in error.message


def test_more_beams_than_a_step_has_room_for(adapter):
    with pytest.raises(InvalidRequest, match=r"beam_width is 16; stage 'main' takes at most 8 sequences"):
        driver(adapter, max_batch=8).engine.add(stage_request("it", sampling=beams(16, 1)))


def test_nan_fails_the_whole_search_and_nothing_else(adapter):
    poisoned = TinyAdapter(adapter.model)
    drive = driver(poisoned)
    poisoned.poison = 96
    drive.add(stage_request("bad", sampling=beams(4, 4, logit_bias={96: 100.0})), PROMPTS[0])
    drive.add(stage_request("good", sampling=GREEDY), PROMPTS[1])
    results = drive.run()
    assert isinstance(results["bad"].last.error, StageFailed)
    assert results["good"].token_ids == generate(adapter.model, PROMPTS[1], TOKENS)
    assert drive.engine.stats()["blocks_used"] == 0


def test_cancelled_at_every_moment(adapter):
    for moment in range(8):
        drive = driver(adapter, max_tokens_per_step=16)
        drive.add(stage_request("it", sampling=beams(4, 4)), PROMPTS[2])
        for _ in range(moment):
            drive.step()
        drive.engine.cancel("it")
        drive.engine.audit()
        assert not drive.engine.has_work()
        assert drive.engine.stats()["blocks_used"] == 0


@pytest.mark.parametrize("kind", ["mistral", "gemma 3"])
def test_layers_with_windows(kind):
    adapter = Windowed(tiny(kind))
    with torch.no_grad():
        adapter.model.lm_head.weight *= 0.4
    expected = [reference(adapter, prompt, 4, 4) for prompt in PROMPTS]
    assert serve(driver(adapter), beams(4, 4)) == expected
    assert serve(driver(adapter, num_blocks=60, prefix_caching=False, max_tokens_per_step=16), beams(4, 4)) == expected


def test_what_is_asked_of_the_prompt_comes_with_the_best(adapter):
    drive = driver(adapter)
    drive.add(stage_request("it", sampling=beams(4, 2, prompt_logprobs=1), to_client=TEXT), PROMPTS[1])
    results = drive.run()
    assert len(results["it"].last.prompt_logprobs) == 16
    assert results[branch("it", 1)].last.prompt_logprobs == []


@pytest.mark.parametrize("num_blocks", [160, 17])
def test_log_probabilities(adapter, expected, num_blocks):
    """Those of the model itself, of every token of every beam: also of beams that were preempted."""
    drive = driver(adapter, num_blocks=num_blocks, max_tokens_per_step=24)
    asked = beams(4, 4, logprobs=2, logprob_token_ids=[7])
    for index, prompt in enumerate(PROMPTS):
        drive.add(stage_request(f"r{index}", sampling=asked, to_client=TEXT), prompt)
    results = drive.run()
    assert (drive.engine.stats()["preemptions_total"] > 0) == (num_blocks == 17)
    for index, prompt in enumerate(PROMPTS):
        for place in range(4):
            result = results[branch(f"r{index}", place)]
            assert result.token_ids == expected[index][place]
            wanted = logprobs_of(adapter.model, prompt, result.token_ids)
            assert len(result.last.logprobs) == len(result.token_ids)
            for token, one, logprob in zip(result.token_ids, result.last.logprobs, wanted.tolist(), strict=True):
                assert one.chosen.token_id == token
                assert one.chosen.logprob == pytest.approx(logprob, abs=1e-4)
                assert {top.token_id: top.rank for top in one.top}[token] == one.chosen.rank
                assert {top.token_id for top in one.top} == {7, token}
            total = sum(one.chosen.logprob for one in result.last.logprobs)
            assert result.last.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_bad_words(adapter, expected):
    """What a beam may not produce now depends on what that very beam has produced."""
    pairs = [expected[0][0][1:3], expected[1][0][2:4], expected[2][0][3:5]]
    banned = [reference(adapter, prompt, 4, 4, bad_words_ids=pairs) for prompt in PROMPTS]
    assert banned != expected
    words = ["".join(chr(ord("A") + token) for token in pair) for pair in pairs]
    assert serve(driver(adapter), beams(4, 4, bad_words=words)) == banned


def test_few_tokens_allowed(adapter):
    allowed = [5, 9, 52, *ENDS]
    found = serve(driver(adapter), beams(4, 4, allowed_token_ids=allowed))
    assert {token for best in found for ids in best for token in ids} <= set(allowed)
    drive = driver(adapter)
    drive.add(stage_request("it", sampling=beams(4, 4, allowed_token_ids=[5], stop_token_ids=[])), PROMPTS[0])
    error = drive.run()["it"].last.error
    assert isinstance(error, InvalidRequest)
    assert "leave 1 outputs of 4" in error.message
