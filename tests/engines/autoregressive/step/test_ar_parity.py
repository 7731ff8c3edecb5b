"""Greedy tokens of the engine equal transformers' `generate`, however they are served."""

from __future__ import annotations

import pytest
import torch
from ar_adapter import Driver, TinyAdapter, generate, prompts, stage_request, tiny_model

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.messages.sampling import SamplingParams

PROMPTS = prompts(5, (3, 17, 32, 9, 50))
ALL = range(len(PROMPTS))
TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def adapter(request):
    return TinyAdapter(tiny_model(request.param))


@pytest.fixture(scope="module")
def expected(adapter):
    answers = [generate(adapter.model, prompt, TOKENS) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) == len(answers), "the weights must make inputs matter"
    assert all(len(set(answer)) > 4 for answer in answers)
    return answers


def driver(adapter, **config) -> Driver:
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**{"num_blocks": 64, "block_size": 8, **config})))


def serve(drive: Driver, sampling: SamplingParams = GREEDY, which=ALL) -> list[list[int]]:
    for index in which:
        drive.add(stage_request(f"r{index}", sampling=sampling), PROMPTS[index])
    results = drive.run()
    assert all(results[f"r{index}"].last.finish_reason == "length" for index in which)
    return [results[f"r{index}"].token_ids for index in which]


def test_alone(adapter, expected):
    drive = driver(adapter)
    for index, answer in enumerate(expected):
        assert serve(drive, which=[index]) == [answer]


def test_batched(adapter, expected):
    drive = driver(adapter)
    assert serve(drive) == expected
    assert drive.engine.stats()["preemptions_total"] == 0


def test_chunked_prefill(adapter, expected):
    before = len(adapter.forwards)
    assert serve(driver(adapter, max_tokens_per_step=8)) == expected
    assert max(adapter.forwards[before:][-40:]) <= 8


def test_after_a_prefix_hit(adapter, expected):
    drive = driver(adapter)
    serve(drive)
    drive.results.clear()
    assert serve(drive) == expected
    assert drive.engine.stats()["prefix_hit_tokens_total"] == sum((len(prompt) - 1) // 8 * 8 for prompt in PROMPTS)
    assert drive.results["r4"].outputs[0].cached_tokens == 48


def test_a_whole_prompt_in_the_cache_computes_one_token(adapter, expected):
    drive = driver(adapter)
    serve(drive, which=[2])
    drive.results.clear()
    before = len(adapter.forwards)
    assert serve(drive, which=[2]) == [expected[2]]
    assert adapter.forwards[before] == 8  # 32 tokens in 4 full blocks: the last block is computed again


def test_after_preemption(adapter, expected):
    drive = driver(adapter, num_blocks=14)
    assert serve(drive) == expected
    assert drive.engine.stats()["preemptions_total"] > 0


def test_after_preemption_without_prefix_caching(adapter, expected):
    drive = driver(adapter, num_blocks=14, prefix_caching=False, max_tokens_per_step=16)
    assert serve(drive) == expected
    assert drive.engine.stats()["preemptions_total"] > 0
    assert drive.engine.stats()["prefix_hit_tokens_total"] == 0


@pytest.mark.parametrize("done", [1, 2, 11, TOKENS])
def test_resumed(adapter, expected, done):
    drive = driver(adapter, max_tokens_per_step=16)
    for index, answer in enumerate(expected):
        drive.add(stage_request(f"r{index}", sampling=GREEDY, resume=answer[:done]), PROMPTS[index])
    results = drive.run()
    assert [results[f"r{index}"].token_ids for index in range(len(expected))] == expected


def test_neighbours_cancelled_and_paused(adapter, expected):
    drive = driver(adapter, num_blocks=20, max_tokens_per_step=32)
    for index, prompt in enumerate(PROMPTS):
        drive.add(stage_request(f"r{index}", sampling=GREEDY), prompt)
    for _ in range(4):
        drive.step()
    drive.engine.cancel("r0")
    drive.engine.cancel("r3")
    drive.engine.cancel("never heard of")
    drive.engine.pause("r1")
    drive.engine.audit()
    drive.run()
    assert drive.results["r2"].token_ids == expected[2]
    assert drive.results["r4"].token_ids == expected[4]
    paused = len(drive.results["r1"].token_ids)
    assert 0 < paused < TOKENS
    drive.engine.resume("r1")
    drive.run()
    assert drive.results["r1"].token_ids == expected[1]
    assert drive.engine.stats()["blocks_used"] == 0


def test_repetition_penalty(adapter, expected):
    penalised = [generate(adapter.model, prompt, TOKENS, repetition_penalty=1.3) for prompt in PROMPTS]
    assert penalised != expected
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, repetition_penalty=1.3)
    assert serve(driver(adapter, num_blocks=16), sampling) == penalised


def test_long_context_over_many_blocks(adapter):
    [prompt] = prompts(1, [180], seed=5)
    drive = driver(adapter, max_tokens_per_step=64)
    drive.add(stage_request("long", sampling=GREEDY), prompt)
    assert drive.run()["long"].token_ids == generate(adapter.model, prompt, TOKENS)


def test_a_changed_weight_changes_the_answer():
    """Parity proves something only if it breaks when the model is another one."""
    adapter = TinyAdapter(tiny_model("qwen2"))
    answers = [generate(adapter.model, prompt, TOKENS) for prompt in PROMPTS]
    assert serve(driver(adapter)) == answers
    with torch.no_grad():
        adapter.model.model.layers[1].self_attn.k_proj.weight[3, 5] += 8.0
    assert serve(driver(adapter)) != answers


def test_sliding_window():
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1, layer_types=None)
    assert model.config.layer_types.count("sliding_attention") == 2
    adapter = TinyAdapter(model)
    answers = [generate(model, prompt, TOKENS) for prompt in PROMPTS]
    assert serve(driver(adapter, max_tokens_per_step=16)) == answers
    assert answers != [generate(tiny_model("qwen2"), prompt, TOKENS) for prompt in PROMPTS]
