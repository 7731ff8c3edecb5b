"""Prefill in chunks of sixteen tokens: a prompt with media takes dozens of steps, between the decoding of others."""

from __future__ import annotations

from pathlib import Path

import pytest
from truth_system import BY_NAME, CASES, LONG, Case, System, Truth

DEPLOYMENT = {"stages": {name: {"max_tokens_per_step": 16} for name in ("thinker", "talker")}}


@pytest.mark.parametrize("case", [*CASES, LONG], ids=lambda case: case.name)
def test_alone(system: System, truth: Truth, assets: Path, case: Case) -> None:
    [output] = system.ask(case.prompt(assets))
    truth.check(output, case)


def test_together_and_after_prefix_hits(system: System, truth: Truth, assets: Path) -> None:
    cases = [LONG, *CASES]
    for output, case in zip(system.ask(*(case.prompt(assets) for case in cases)), cases, strict=True):
        truth.check(output, case)
        assert output.usage.cached_tokens > 0


def test_prompts_were_cut(system: System, truth: Truth, assets: Path) -> None:
    """The step's budget is kept: its prompt cannot have gone through in one."""
    case = BY_NAME["mixed"]
    [output] = system.ask(case.prompt(assets))
    truth.check(output, case)
    assert output.usage.prompt_tokens > 10 * 16
