"""Prefill in chunks of sixteen tokens: a prompt with media takes dozens of steps, between the decoding of others."""

from __future__ import annotations

from pathlib import Path

import pytest
from truth_system import BY_NAME, CASES, LONG, WITHIN, Case, System, Truth, assert_equals, longer

pytestmark = pytest.mark.nightly  # test_truth_preempted has chunks as small

DEPLOYMENT = {"stages": {name: {"max_tokens_per_step": 16} for name in ("thinker", "talker")}}


@pytest.mark.parametrize("case", [*CASES, LONG], ids=lambda case: case.name)
def test_alone(system: System, truth: Truth, assets: Path, case: Case) -> None:
    [output] = system.ask(case.prompt(assets))
    truth.check(output, case)


def test_together_and_after_prefix_hits(system: System, truth: Truth, assets: Path) -> None:
    cases = [LONG, *CASES]
    for again in (False, True):
        for output, case in zip(system.ask(*(case.prompt(assets) for case in cases)), cases, strict=True):
            truth.check(output, case)
            assert not again or output.usage.cached_tokens > 0


def test_prompts_were_cut(system: System, truth: Truth, assets: Path) -> None:
    """A prompt of so many tokens takes at least so many steps of sixteen."""

    async def steps(prefilled: float) -> tuple[float, float]:
        counts = await system.stats("thinker", "prefill_tokens_total", lambda one: one.get(0, -1.0) >= prefilled)
        [tokens] = counts.values()
        [count] = (await system.stats("thinker", "step_seconds", lambda one: True)).values()
        return tokens, count

    tokens, before = system.run(steps(0.0))
    case = longer(BY_NAME["mixed"], text="Nobody asked this before.", tokens=1)
    [output] = system.ask(case.prompt(assets, modalities=["text"]))
    computed = output.usage.prompt_tokens - output.usage.cached_tokens
    _, after = system.run(steps(tokens + computed))
    assert after - before >= computed / 16


def test_a_prompt_that_is_cut_says_the_same_the_first_time(system: System, truth: Truth, assets: Path) -> None:
    """Nothing of it being in the cache."""
    case = longer(BY_NAME["text"], text="One two three four. " * 20, seed=50)
    prompt = case.prompt(assets)
    prompt["messages"].insert(0, {"role": "system", "content": "Be quick."})
    messages = [("system", "Be quick."), ("user", case.text)]
    spoken = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in messages]
    inputs = truth.reference.process(truth.reference.prompt(spoken))
    reply = truth.reference.generate(inputs, max_tokens=case.tokens, max_codes=case.codes, noise_seed=case.seed)
    [output] = system.ask(prompt)
    assert output.usage.prompt_tokens - output.usage.cached_tokens > 10 * 16
    assert_equals(output, reply, truth.reference, within=WITHIN[1])
