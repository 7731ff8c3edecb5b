"""kill -9 of a worker in every stage: the same tokens, codes and samples, nothing twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from truth_system import BY_NAME, LONG, LONG_MIXED, Case, System, Truth, assert_same, longer, spans

from segue.messages.deltas import AudioDelta, Delta, TextDelta
from segue.messages.sampling import SamplingParams
from segue.orchestrator.omni.outputs import RequestOutput
from selection import daily

FIRST = {"thinker": TextDelta, "talker": TextDelta, "vocoder": AudioDelta}
"""The first of these, and the stage is at work: the talker starts at the reply's second token."""
SAMPLED = {
    "thinker": SamplingParams(temperature=0.9, max_tokens=60),
    "talker": SamplingParams(temperature=0.9, max_tokens=120),
}


class Killer:
    """Kills a stage's worker at the first delta of a kind: after `skip` others of it."""

    def __init__(self, system: System, stage: str, kind: type, skip: int = 0) -> None:
        self._system, self._stage, self._kind, self._skip = system, stage, kind, skip
        self.done = False

    def __call__(self, delta: Delta) -> None:
        if self.done or not isinstance(delta, self._kind):
            return
        if self._skip:
            self._skip -= 1
            return
        self.done = True
        self._system.kill(self._stage)


@pytest.mark.parametrize("stage", ["input", "encoder"])
@pytest.mark.parametrize("name", [pytest.param("image", marks=pytest.mark.nightly), "mixed"])
def test_killed_before_it_answered(system: System, truth: Truth, assets: Path, stage: str, name: str) -> None:
    """The worker is stopped while the request arrives, and killed with it in its hands."""

    async def body() -> None:
        worker = system.stopped(stage)
        task = asyncio.create_task(system.collect(BY_NAME[name].prompt(assets)))
        other = asyncio.create_task(system.collect(BY_NAME["text"].prompt(assets)))
        await system.admitted(2)
        worker.kill()
        output = await task
        truth.check(output, BY_NAME[name])
        assert output.metrics.attempts == 2
        assert spans(output) == {"input", "encoder", "thinker", "talker", "vocoder"}
        truth.check(await other, BY_NAME["text"])

    system.run(body())


@pytest.mark.parametrize(
    "case", [pytest.param(LONG, marks=pytest.mark.nightly), LONG_MIXED], ids=lambda case: case.name
)
@pytest.mark.parametrize("stage", ["thinker", "talker", "vocoder"])
def test_killed_at_work(system: System, truth: Truth, assets: Path, stage: str, case: Case) -> None:
    """At the first delta, others being in the same worker."""

    async def body() -> RequestOutput:
        killer = Killer(system, stage, FIRST[stage])
        task = asyncio.create_task(system.collect(case.prompt(assets), killer))
        others = [BY_NAME["text"], BY_NAME["image"]]
        outputs = await asyncio.gather(task, *(system.collect(other.prompt(assets)) for other in others))
        assert killer.done
        for output, one in zip(outputs, [case, *others], strict=True):
            truth.check(output, one)
        return outputs[0]

    output = system.in_time(body, lambda output: output.metrics.attempts > 1)
    assert output.metrics.attempts == 2


@pytest.mark.parametrize(
    "with_upstream", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["alone", "with its upstream"]
)
@pytest.mark.parametrize("stage", daily(("thinker", "talker", "vocoder"), ("talker",)))
def test_killed_when_its_upstream_had_ended(
    system: System, truth: Truth, assets: Path, stage: str, with_upstream: bool
) -> None:
    """Everything it was sent is there again: out of what the upstream retained, or from an upstream that runs again."""
    upstream = {"thinker": "input", "talker": "thinker", "vocoder": "talker"}[stage]

    async def body() -> None:
        worker = system.stopped(stage)
        task = asyncio.create_task(system.collect(LONG_MIXED.prompt(assets)))
        await system.admitted()
        [state] = system.omni.orchestrator.requests.values()
        while not state.stages[upstream].done:
            # a round trip through a worker that is not stopped
            await (system.refused() if stage == "thinker" else system.tick())
        if with_upstream:
            system.kill(upstream)
        worker.kill()
        output = await task
        truth.check(output, LONG_MIXED)
        assert output.metrics.attempts == 2 + with_upstream

    system.run(body())


@pytest.mark.parametrize("stage", ["input", "thinker"])
def test_a_stage_that_has_done_its_part_may_die(system: System, truth: Truth, assets: Path, stage: str) -> None:
    """Killed at the first sound: the input is long done with; the thinker, where it has ended, is not asked again."""
    system.run(system.replaced())
    killer = Killer(system, stage, AudioDelta)
    output = system.run(system.collect(LONG.prompt(assets), killer))
    assert killer.done
    truth.check(output, LONG)
    assert output.metrics.attempts <= (1 if stage == "input" else 2)


def test_killed_twice_in_one_request(system: System, truth: Truth, assets: Path) -> None:
    async def body() -> RequestOutput:
        thinker, vocoder = Killer(system, "thinker", TextDelta, skip=3), Killer(system, "vocoder", AudioDelta)

        def both(delta: Delta) -> None:
            thinker(delta)
            vocoder(delta)

        output = await system.collect(LONG.prompt(assets), both)
        assert thinker.done
        assert vocoder.done
        truth.check(output, LONG)
        return output

    output = system.in_time(body, lambda output: output.metrics.attempts > 2)
    assert output.metrics.attempts == 3


def test_all_workers_at_once(system: System, truth: Truth, assets: Path) -> None:
    def kill_all(delta: Delta) -> None:
        if isinstance(delta, AudioDelta) and not killed:
            for stage in ("input", "thinker", "talker", "vocoder"):
                killed.append(stage)
                system.kill(stage)

    killed: list[str] = []
    case = longer(LONG, text="Where do the stones at the shore come from?", seed=31)
    prompt = case.prompt(assets)
    output = system.run(system.collect({**prompt}, kill_all))
    assert killed
    truth.check(output, case)


@pytest.mark.parametrize("stage", ["thinker", pytest.param("talker", marks=pytest.mark.nightly)])
def test_sampled_is_the_same_alone_in_a_batch_and_after_a_kill(system: System, assets: Path, stage: str) -> None:
    prompt = LONG.prompt(assets, sampling=SAMPLED)
    [alone] = system.ask(prompt)
    others = [BY_NAME[name].prompt(assets) for name in ("text", "image", "audio")]
    assert_same(system.ask(prompt, *others)[0], alone)

    async def body() -> RequestOutput:
        killer = Killer(system, stage, FIRST[stage], skip=2)
        killed = await system.collect(prompt, killer)
        assert killer.done
        assert_same(killed, alone)
        return killed

    assert system.in_time(body, lambda output: output.metrics.attempts > 1).metrics.attempts == 2
    [reseeded] = system.ask(LONG.prompt(assets, sampling=SAMPLED, seed=14))
    assert reseeded.token_ids["thinker"] != alone.token_ids["thinker"]
    [greedy] = system.ask(LONG.prompt(assets))
    assert greedy.token_ids["talker"] != alone.token_ids["talker"]
