"""Greedy tokens of every kind of causal LM equal transformers' `generate`, however they are served."""

from __future__ import annotations

from pathlib import Path

import pytest
from causal_lm_family import KINDS, Served, load, make, prompts, varied

from segue.kernels.cpu_kernels import cpu_kernels
from selection import daily

PROMPTS = prompts()
TOKENS = 14


DAILY = (
    "llama",
    "mistral",
    "mixtral",
    "qwen3",
    "gemma3",
    "phi3",
    "gpt-oss",
    "gpt2",
    "opt",
    "deepseek_v3",
    "gemma3n_text",
    "longcat_flash",
)
"""Of kinds of attention, of positions, of normalisation and of experts."""


@pytest.fixture(scope="module", params=daily(KINDS, DAILY))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    return varied(directory, PROMPTS, TOKENS)


def test_parity(directory: Path, expected: list[list[int]]) -> None:
    """In one batch, with prefill in pieces, with prefix hits, and after preemption."""
    adapter = load(directory)
    served = Served(adapter, max_tokens_per_step=48)
    assert served.run(PROMPTS, TOKENS) == expected
    assert served.engine.stats()["preemptions_total"] == 0
    hits = served.engine.stats()["prefix_hit_tokens_total"]
    assert served.run(PROMPTS, TOKENS) == expected
    assert served.engine.stats()["prefix_hit_tokens_total"] - hits > 500
    groups = adapter.kv.layout(adapter.max_model_len).groups
    tight = Served(adapter, num_blocks=24 if groups == 1 else 16 * groups, max_tokens_per_step=64)
    assert tight.run(PROMPTS, TOKENS) == expected
    assert tight.engine.stats()["preemptions_total"] > 0


NOT_RECORDED = {"gpt-oss", "gemma2", "longcat_flash"}
"""The compiled kernels have neither gpt-oss' sinks nor the soft cap of Gemma 2; LongCat's routing uses an operator
whose result depends on values that the host reads."""


@pytest.mark.skipif(cpu_kernels() is None, reason="the kernels were not compiled, or not for this CPU")
def test_played_back(directory: Path, expected: list[list[int]], request: pytest.FixtureRequest) -> None:
    """Decode steps from recordings, in batches of all sizes and beside prefill."""
    served = Served(load(directory), max_batch=6, max_tokens_per_step=48)
    served.engine.warm_up()
    assert served.run(PROMPTS, TOKENS) == expected
    before = served.engine.stats()["recorded_steps_total"]
    longest = max(range(len(PROMPTS)), key=lambda index: len(expected[index]))
    assert served.run([PROMPTS[longest]], TOKENS) == [expected[longest]]
    recorded = served.engine.stats()["recorded_steps_total"] - before
    played = request.node.callspec.params["directory"] not in NOT_RECORDED
    assert recorded == (len(expected[longest]) - 1 if played else 0)
