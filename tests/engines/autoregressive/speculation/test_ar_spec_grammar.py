"""Structured output with speculation: drafts are verified under the grammar; the tokens are those of plain steps."""

from __future__ import annotations

import re

import pytest
from ar_adapter import Driver, stage_request, tiny_model
from ar_speculation import PROMPTS, Prophet
from ar_words import TEXT, WordAdapter, driver, finish

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.grammar.grammar import Grammars
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.messages.sampling import SamplingParams, StructuredOutput

FORM = StructuredOutput(regex="(yes|no) [0-9]{2,9}!")


@pytest.fixture(scope="module")
def adapter() -> WordAdapter:
    return WordAdapter(tiny_model("qwen2", seed=7, vocab_size=110))


def write(drive: Driver, there, temperature: float) -> list[list[int]]:
    names = [f"r{index}" for index in range(len(PROMPTS))]
    params = SamplingParams(temperature=temperature, max_tokens=20, structured_outputs=FORM)
    for index, name in enumerate(names):
        drive.add(stage_request(name, sampling=params, to_client=TEXT, seed=index), PROMPTS[index])
    finish(drive, there, names)
    for name in names:
        assert re.fullmatch(FORM.regex or "", drive.results[name].text)
    return [drive.results[name].token_ids for name in names]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("truth", [1.0, 0.6])
def test_tokens_equal_plain_ones(adapter: WordAdapter, temperature: float, truth: float) -> None:
    drive, there = driver(adapter)
    plain = write(drive, there, temperature)
    sizes = AutoregressiveConfig(num_blocks=200, block_size=8)
    prophet = Prophet(plain, truth)
    engine = AutoregressiveEngine(
        adapter, sizes, Grammars.of(adapter, there.set), Speculation(prophet, 4, adaptive=False)
    )
    before = len(adapter.forwards)
    assert write(Driver(engine), there, temperature) == plain
    stats = engine.stats()
    assert stats["spec_accepted_tokens_total"] > 0
    if truth == 1.0:
        assert len(adapter.forwards) - before < max(map(len, plain)), "drafts save steps"
        assert stats["spec_accepted_tokens_total"] == stats["spec_draft_tokens_total"]
