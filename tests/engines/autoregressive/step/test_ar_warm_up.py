"""Warming up runs the decoder in the shapes of first requests, and leaves nothing behind."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
import torch
from ar_adapter import ConditionedAdapter, Driver, TinyAdapter, generate, prompts, stage_request, tiny_model

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.step.warm_up import SECONDS, warm_up
from segue.messages.sampling import SamplingParams


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def engine_of(adapter: TinyAdapter, **sizes: int) -> AutoregressiveEngine:
    engine = AutoregressiveEngine(adapter, AutoregressiveConfig(**{"num_blocks": 32, "block_size": 4, **sizes}))
    adapter.forwards.clear()  # those of the check at load
    return engine


def test_batches_up_to_the_largest_and_prompts_of_several_lengths_are_run(model) -> None:
    adapter = TinyAdapter(model)
    config = AutoregressiveConfig(num_blocks=32, block_size=4, max_batch=6, max_tokens_per_step=100)
    warm_up(adapter, config, clock=lambda: 0.0)
    assert sorted(adapter.forwards) == [1, 2, 4, 16, 32, 64]
    assert adapter.forwards[:2] == [16, 1], "what every first request meets comes first"


def test_a_slow_model_does_not_run_all_of_them(model) -> None:
    adapter = TinyAdapter(model)
    config = AutoregressiveConfig(num_blocks=32, block_size=4, max_batch=6, max_tokens_per_step=100)
    warm_up(adapter, config, clock=partial(next, count(step=SECONDS / 2)))
    assert adapter.forwards == [16, 1, 32]


def test_nothing_is_left_behind(model) -> None:
    adapter = TinyAdapter(model, capture=True)
    engine = engine_of(adapter)
    torch.manual_seed(5)
    before, state = engine.stats(), torch.random.get_rng_state()
    engine.warm_up()
    assert engine.stats() == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not engine.has_work()
    engine.audit()


@pytest.mark.parametrize("sizes", [{}, {"max_batch": 1}, {"max_tokens_per_step": 5}, {"num_blocks": 1}])
def test_tokens_are_those_of_the_library_after_it(model, sizes: dict[str, int]) -> None:
    prompt = prompts(1, [3])[0]
    tokens = 1 if "num_blocks" in sizes else 6
    engine = engine_of(TinyAdapter(model), **sizes)
    engine.warm_up()
    driver = Driver(engine)
    driver.add(stage_request("a", sampling=SamplingParams(temperature=0.0, max_tokens=tokens)), prompt)
    assert driver.run()["a"].token_ids == generate(model, prompt, tokens)
    assert driver.results["a"].outputs[0].cached_tokens == 0


def test_a_conditioned_decoder_is_warmed_up_too(model) -> None:
    adapter = ConditionedAdapter(model)
    engine_of(adapter).warm_up()
    assert adapter.forwards
