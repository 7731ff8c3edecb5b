"""Greedy tokens of every kind of causal LM equal transformers' `generate`, however they are served."""

from __future__ import annotations

from pathlib import Path

import pytest
from causal_lm_family import KINDS, Served, generate, load, make, prompts

PROMPTS = prompts()
TOKENS = 14


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    answers = generate(directory, PROMPTS, TOKENS)
    several = [tuple(answer) for answer in answers if len(answer) > 2]
    assert len(several) > 15
    assert len(set(several)) == len(several), "the weights must make inputs matter"
    assert len({token for answer in several for token in answer}) > 50
    assert sum(answer.count(answer[-1]) == 1 and len(answer) < TOKENS for answer in answers) > 2, "some end"
    return answers


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
