"""Two talkers and two vocoders: whoever serves a request, it says the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from truth_system import CASES, LONG, LONG_MIXED, System, Truth

from segue.messages.deltas import AudioDelta, Delta
from selection import daily

DEPLOYMENT = {"stages": {"talker": {"replicas": 2}, "vocoder": {"replicas": 2}}}


@pytest.mark.nightly
def test_many_at_once_over_both(system: System, truth: Truth, assets: Path) -> None:
    system.run(system.all_ready())
    cases = [*CASES, LONG, LONG_MIXED]
    for output, case in zip(system.ask(*(case.prompt(assets) for case in cases)), cases, strict=True):
        truth.check(output, case)

    for stage, made in (("talker", "generated_tokens_total"), ("vocoder", "calls_total")):
        system.run(system.stats(stage, made, lambda counts: len(counts) == 2 and min(counts.values()) > 0))


@pytest.mark.parametrize("stage", daily(("talker", "vocoder"), ("vocoder",)))
def test_a_sibling_takes_over(system: System, truth: Truth, assets: Path, stage: str) -> None:
    """One of the two is killed at the first sound; both requests go on, one of them elsewhere."""

    async def body() -> int:
        killed: list[int] = []

        def kill(delta: Delta) -> None:
            replicas = system.omni.orchestrator.replicas.all
            busy = [replica for replica in replicas if replica.group == (stage,) and replica.requests]
            if isinstance(delta, AudioDelta) and busy and not killed:
                assert busy[0].pid is not None
                killed.append(busy[0].pid)
                system.kill_worker(busy[0].pid)

        await system.all_ready()
        cases = [LONG, LONG_MIXED]
        outputs = await asyncio.gather(*(system.collect(case.prompt(assets), kill) for case in cases))
        for output, case in zip(outputs, cases, strict=True):
            truth.check(output, case)
        return max(output.metrics.attempts for output in outputs)

    assert system.in_time(body, lambda attempts: attempts > 1) == 2


def test_the_two_share_their_weights_whichever_of_them_dies(system: System, truth: Truth, assets: Path) -> None:
    """All private memory that a talker's weights would take is mapped, also after both have been killed, one by one."""
    system.run(system.all_ready())
    system.ask(LONG.prompt(assets), LONG_MIXED.prompt(assets))
    shared = system.run(system.stats("talker", "shared_weight_bytes", lambda found: len(found) == 2))
    assert shared[0] == shared[1] > 1 << 18
    for replica in (0, 1):
        pid = system.pid("talker", replica)
        system.kill_worker(pid)
        system.run(system.replaced())
        lines = Path(f"/proc/{system.pid('talker', replica)}/maps").read_text().splitlines()
        mapped = [line for line in lines if "segue-weights" in line]
        assert mapped
        assert all(" rw-p " in line for line in mapped), "private mappings: nobody can write to another's weights"
    outputs = system.ask(*(LONG.prompt(assets) for _ in range(3)))
    assert system.run(system.stats("talker", "shared_weight_bytes", lambda found: len(found) == 2)) == shared
    for output in outputs:
        truth.check(output, LONG)
