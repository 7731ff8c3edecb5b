"""Log-probabilities against the library's own logits, in every way a request can be served."""

from __future__ import annotations

import pytest
import torch
from ar_adapter import VOCAB, Driver, TinyAdapter, generate, prompts, stage_request, tiny_model

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.sample import prompt_logprobs as module
from segue.engines.autoregressive.sample.logprobs import Likelihoods, Wanted
from segue.kernels.attention.paged_attention import NAME
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams

PROMPTS = prompts(4, (5, 16, 33, 24))
TOKENS = 12
TEXT = frozenset({"text"})
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def adapter():
    return TinyAdapter(tiny_model("qwen2", seed=7))


def driver(adapter, **config) -> Driver:
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**{"num_blocks": 64, "block_size": 8, **config})))


def scores(model, ids) -> torch.Tensor:
    """[T, vocab] log-probabilities of what follows each token, by the library alone."""
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)
    finally:
        model.set_attn_implementation(NAME)


def check(told, row: torch.Tensor, token: int, top: int) -> None:
    assert told.chosen.token_id == token
    assert told.chosen.logprob == pytest.approx(float(row[token]), abs=1e-4)
    assert told.chosen.rank == int((row > row[token]).sum()) + 1
    best = row.topk(top)
    assert [one.token_id for one in told.top] == best.indices.tolist()
    assert [one.rank for one in told.top] == list(range(1, top + 1))
    torch.testing.assert_close(torch.tensor([one.logprob for one in told.top]), best.values, **CLOSE)
    for one in (told.chosen, *told.top):
        assert one.data == chr(ord("A") + one.token_id).encode()
        assert one.text == one.data.decode()


def ask(drive: Driver, which=(0, 1, 2, 3), **sampling):
    for index in which:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, **sampling})
        drive.add(stage_request(f"r{index}", sampling=params, to_client=TEXT, seed=index), PROMPTS[index])
    results = drive.run()
    return [results[f"r{index}"] for index in which]


def told_of(result):
    return [one for output in result.outputs for one in output.logprobs]


@pytest.mark.parametrize("config", [{}, {"max_tokens_per_step": 8}, {"num_blocks": 14}], ids=["whole", "chunks", "few"])
def test_of_the_output(adapter, config):
    for result, prompt in zip(ask(driver(adapter, **config), logprobs=3), PROMPTS, strict=True):
        rows = scores(adapter.model, [*prompt, *result.token_ids])
        told = told_of(result)
        assert len(told) == TOKENS
        for place, one in enumerate(told):
            check(one, rows[len(prompt) - 1 + place], result.token_ids[place], 3)


def test_are_of_the_model_and_not_of_the_sampler(adapter):
    """Temperature, filters, penalties and bans change which token is drawn, not what is told of it."""
    ways = {
        "temperature": 1.7, "top_k": 30, "repetition_penalty": 1.4, "presence_penalty": 0.5,
        "logit_bias": {3: 4.0}, "suppress_tokens": [9], "logprobs": 2,
    }  # fmt: skip
    ranks = []
    for result, prompt in zip(ask(driver(adapter), **ways), PROMPTS, strict=True):
        rows = scores(adapter.model, [*prompt, *result.token_ids])
        for place, one in enumerate(told_of(result)):
            check(one, rows[len(prompt) - 1 + place], result.token_ids[place], 2)
            ranks.append(one.chosen.rank)
    assert max(ranks) > 2


def test_neighbours_with_other_wishes(adapter):
    drive = driver(adapter, max_logprobs=-1)
    wishes = [None, 0, 5, -1]
    for index, wish in enumerate(wishes):
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=wish)
        drive.add(stage_request(f"r{index}", sampling=params, to_client=TEXT), PROMPTS[index])
    results = drive.run()
    assert [len(told_of(results[f"r{index}"])) for index in range(4)] == [0, TOKENS, TOKENS, TOKENS]
    assert [len(told_of(results[f"r{index}"])[0].top) for index in (1, 2, 3)] == [0, 5, VOCAB]
    assert [results[f"r{index}"].token_ids for index in range(4)] == [
        generate(adapter.model, prompt, TOKENS) for prompt in PROMPTS
    ]


def test_tokens_asked_for_by_id(adapter):
    [result] = ask(driver(adapter), [1], logprob_token_ids=[96, 4, 4], logprobs=3)
    rows = scores(adapter.model, [*PROMPTS[1], *result.token_ids])
    for place, one in enumerate(told_of(result)):
        row = rows[len(PROMPTS[1]) - 1 + place]
        assert {top.token_id for top in one.top} == {4, 96, one.chosen.token_id}, "and not the three most likely"
        assert len(one.top) <= 3
        assert [top.rank for top in one.top] == sorted(int((row > row[top.token_id]).sum()) + 1 for top in one.top)


def test_equals_share_a_rank():
    likely = Likelihoods(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), [Wanted(4)])
    [one] = likely.of([2], None)
    assert [(top.rank, top.text, top.data) for top in one.top] == [
        (1, "", b""),
        (1, "", b""),
        (3, "", b""),
        (4, "", b""),
    ]
    assert one.chosen.rank == 1


@pytest.mark.parametrize(
    ("config", "rows_per_slice"),
    [({}, 1000), ({"max_tokens_per_step": 8}, 1000), ({"num_blocks": 14, "max_tokens_per_step": 16}, 1000), ({}, 3)],
    ids=["whole", "chunks", "preempted", "slices"],
)
def test_of_the_prompt(adapter, config, rows_per_slice, monkeypatch):
    monkeypatch.setattr(module, "SLICE_BYTES", rows_per_slice * 4 * VOCAB)
    drive = driver(adapter, **config)
    ask(drive)  # the cache is full of these prompts
    drive.results.clear()
    for result, prompt in zip(ask(drive, prompt_logprobs=2), PROMPTS, strict=True):
        rows = scores(adapter.model, prompt)
        [first] = [output for output in result.outputs if output.prompt_logprobs]
        assert first.token_ids == result.token_ids[:1]
        nothing, *told = first.prompt_logprobs
        assert nothing is None
        assert len(told) == len(prompt) - 1
        for place, one in enumerate(told):
            check(one, rows[place], prompt[place + 1], 2)
    if "num_blocks" in config:
        assert drive.engine.stats()["preemptions_total"] > 0


def test_of_the_prompt_takes_no_hit_and_leaves_one(adapter):
    drive = driver(adapter)
    [first] = ask(drive, [2], prompt_logprobs=0)
    drive.results.clear()
    [second] = ask(drive, [2], prompt_logprobs=0)
    assert second.outputs[0].cached_tokens == 0
    assert [one and one.chosen for output in first.outputs for one in output.prompt_logprobs] == [
        one and one.chosen for output in second.outputs for one in output.prompt_logprobs
    ]
    drive.results.clear()
    [third] = ask(drive, [2])
    assert third.outputs[0].cached_tokens == 32


def test_a_prompt_of_one_token(adapter):
    drive = driver(adapter)
    drive.add(stage_request("it", sampling=SamplingParams(max_tokens=1, prompt_logprobs=1), to_client=TEXT), [5])
    assert drive.run()["it"].outputs[0].prompt_logprobs == [None]


def test_other_weights_are_told_apart(adapter):
    """The comparison fails where a weight is another one."""
    other = TinyAdapter(tiny_model("qwen2", seed=8))
    [result] = ask(driver(other), [1], logprobs=1)
    row = scores(adapter.model, [*PROMPTS[1], *result.token_ids])[len(PROMPTS[1]) - 1]
    with pytest.raises(AssertionError):
        check(told_of(result)[0], row, result.token_ids[0], 1)


def test_after_a_resume_only_the_new_tokens_have_them(adapter):
    answer = generate(adapter.model, PROMPTS[0], TOKENS)
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=1, prompt_logprobs=1)
    drive = driver(adapter)
    drive.add(stage_request("it", sampling=sampling, to_client=TEXT, resume=answer[:5]), PROMPTS[0])
    result = drive.run()["it"]
    assert result.token_ids == answer
    first = result.outputs[0]
    assert first.token_ids == answer[:5]
    assert [one.chosen.token_id for one in first.logprobs] == [answer[4]]
    assert len(told_of(result)) == TOKENS - 4
    assert not any(output.prompt_logprobs for output in result.outputs)


def test_prompt_ids_where_asked_for(adapter):
    drive = driver(adapter, max_tokens_per_step=8)
    for name, resume in (("new", []), ("resumed", [1, 2])):
        request = stage_request(name, sampling=SamplingParams(max_tokens=4), to_client=TEXT, resume=resume)
        request.request = Request(request_id=name, return_prompt_ids=True)
        drive.add(request, PROMPTS[2])
    results = drive.run()
    given = [output.prompt_token_ids for output in results["new"].outputs if output.prompt_token_ids]
    assert given == [PROMPTS[2]]
    assert not any(output.prompt_token_ids for output in results["resumed"].outputs)


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        ({"logprobs": 21}, "logprobs asks for 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs asks for all"),
        ({"logprob_token_ids": list(range(21))}, "logprob_token_ids asks for 21"),
    ],
)
def test_too_many_are_refused(adapter, sampling, word):
    with pytest.raises(InvalidRequest, match=f"sampling.main.{word}.*at most 20"):
        driver(adapter).add(stage_request("it", sampling=SamplingParams(**sampling), to_client=TEXT), PROMPTS[0])


def test_refused_where_nobody_sees_them(adapter):
    with pytest.raises(InvalidRequest, match="gets no text from stage 'main'"):
        driver(adapter).add(stage_request("it", sampling=SamplingParams(logprobs=1)), PROMPTS[0])


def test_the_bound_is_checked():
    with pytest.raises(ConfigError, match="max_logprobs is -2"):
        AutoregressiveConfig(num_blocks=1, max_logprobs=-2)
