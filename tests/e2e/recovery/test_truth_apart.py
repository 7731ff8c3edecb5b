"""The encoder in a worker of its own, the vocoder decoding whole utterances: the waveform to float32 rounding."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from truth_system import BY_NAME, CASES, LONG, WITHIN, Case, System, Truth, spans

DEPLOYMENT = {"stages": {"encoder": {"fuse_with": None}, "vocoder": {"options": {"look_ahead": "all"}}}}


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*CASES, LONG], ids=lambda case: case.name)
def test_alone(system: System, truth: Truth, assets: Path, case: Case) -> None:
    [output] = system.ask(case.prompt(assets))
    truth.check(output, case, within=WITHIN["all"])
    assert ("encoder" in spans(output)) == bool(case.kinds)


@pytest.mark.nightly
def test_together(system: System, truth: Truth, assets: Path) -> None:
    assert system.pid("encoder") != system.pid("thinker")
    cases = [*CASES, LONG]
    for output, case in zip(system.ask(*(case.prompt(assets) for case in cases)), cases, strict=True):
        truth.check(output, case, within=WITHIN["all"])
        assert ("encoder" in spans(output)) == bool(case.kinds)


@pytest.mark.parametrize("name", ["image", pytest.param("mixed", marks=pytest.mark.nightly)])
def test_an_encoder_killed_with_requests_in_its_hands(system: System, truth: Truth, assets: Path, name: str) -> None:
    """Only the encoder starts anew: the thinker waits for it, requests without media do not."""

    async def body() -> None:
        thinker = system.pid("thinker")
        worker = system.stopped("encoder")
        task = asyncio.create_task(system.collect(BY_NAME[name].prompt(assets)))
        truth.check(await system.collect(BY_NAME["text"].prompt(assets)), BY_NAME["text"], within=WITHIN["all"])
        worker.kill()
        output = await task
        truth.check(output, BY_NAME[name], within=WITHIN["all"])
        assert output.metrics.attempts == 2
        assert system.pid("thinker") == thinker

    system.run(body())


@pytest.mark.nightly  # test_truth_alone
def test_parity_fails_for_other_noise(system: System, truth: Truth, assets: Path) -> None:
    [output] = system.ask(LONG.prompt(assets, seed=LONG.seed + 1))
    with pytest.raises(AssertionError, match="waveform"):
        truth.check(output, LONG, within=1000 * WITHIN["all"])
