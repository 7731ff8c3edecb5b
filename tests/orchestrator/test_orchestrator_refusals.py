"""Requests that end before their time: refused, failed, cancelled, too late, too many."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_system import Gate, System, assert_right, both, collect, pid_of

from segue.messages.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    StageFailed,
)
from segue.messages.sampling import SamplingParams
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("toy_path")


def test_a_stage_that_raises_fails_its_request_alone(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            for stage in ("counter", "tone"):
                good, bad = await asyncio.gather(
                    omni.generate(both("fine")),
                    omni.generate(both("bad", fail_at={"stage": stage, "at": 4})),
                    return_exceptions=True,
                )
                assert isinstance(bad, StageFailed)
                assert bad.stage == stage
                assert "told to fail at 4" in bad.message
                assert isinstance(good, RequestOutput)
                assert_right(good, "fine")

    system.run(body)


def test_what_the_input_stage_refuses_names_the_field(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            with pytest.raises(InvalidRequest, match="forbidden") as caught:
                await omni.generate("forbidden")
            assert caught.value.field == "messages[0].content"

    system.run(body)


def test_cancelling_reaches_every_stage(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.shared() as omni:
            task = asyncio.create_task(collect(omni, both("cancel me", hold=gate.option("tone", 2))))
            held = await gate.reached()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            os.close(held)
            gate.remove()
            # a second request through the same workers, then they must hold nothing
            assert_right(await omni.generate(both("after")), "after")
            assert not omni.orchestrator.requests
            stats = await idle_stats(omni)
            assert stats["counter"]["blocks_used"] == 0
            assert stats["counter"]["running"] == stats["counter"]["waiting"] == 0
            assert stats["tone"]["running"] == stats["tone"]["waiting"] == 0

    system.run(body)


async def idle_stats(omni: AsyncOmni) -> dict[str, dict[str, float]]:
    """The newest stats of every stage, once all workers have reported that they are idle."""
    while True:
        reports = [stage for stats in omni.orchestrator.stats.values() for stage in stats.stages]
        stages: dict[str, Any] = {report.stage: report.values for report in reports}
        if len(stages) == 4 and all(not values["running"] and not values["waiting"] for values in stages.values()):
            return stages
        await omni.generate("tick")  # makes every worker on its way report again


def test_a_deadline_ends_the_request(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        held = gate.keep()  # wherever the request is when its time is over: it does not get past the tone
        async with system.shared() as omni:
            prompt = {**both("late", hold=gate.option("tone", 2)), "deadline": time.time() + 0.5}
            with pytest.raises(DeadlineExceeded):
                await collect(omni, prompt)
            os.close(held)
            gate.remove()
            assert_right(await omni.generate("in time"), "in time")

    system.run(body)


def test_the_queue_is_bounded(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.own(limits={"max_waiting": 1}) as omni:
            task = asyncio.create_task(collect(omni, both("first", hold=gate.option("tone", 2))))
            held = await gate.reached()
            with pytest.raises(Overloaded, match="max_waiting"):
                await omni.generate("second")
            room = asyncio.create_task(omni.room())
            gate.remove()
            os.close(held)
            assert_right(await task, "first")
            await room
            await omni.room()  # there is some
            assert_right(await omni.generate("third"), "third")

    system.run(body)


def test_bad_requests_are_refused_at_the_door(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            with pytest.raises(InvalidRequest, match="modalities"):
                await omni.generate({**both("x"), "modalities": ["smell"]})
            with pytest.raises(NotFound, match="did you mean 'one'"):
                await omni.generate({**both("x"), "voice": "onee"})
            with pytest.raises(InvalidRequest, match="did you mean 'counter'"):
                await omni.generate({**both("x"), "sampling": {"countr": {"temperature": 0}}})
            with pytest.raises(InvalidRequest, match="did you mean 'hold'"):
                await omni.generate(both("x", hld=1))
            with pytest.raises(InvalidRequest, match="did you mean 'messages'"):
                await omni.generate({"mesages": []})
            with pytest.raises(InvalidRequest, match="the prompt is 5; it must be text, or a dict"):
                await omni.generate(5)  # type: ignore[arg-type]

    system.run(body)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"seed": "one"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"priority": "high"}, "priority"),
        ({"priority": 5}, "priority"),  # where nothing is scheduled by it
        ({"deadline": "soon"}, "deadline"),
        ({"voice": 5}, "voice"),
        ({"modalities": "text"}, "modalities"),
        ({"modalities": [5]}, "modalities[0]"),
        ({"options": [1]}, "options"),
        ({"options": {"hold": object()}}, None),
        ({"sampling": "hot"}, "sampling"),
        ({"sampling": {"counter": 5}}, "sampling.counter"),
        ({"sampling": {"counter": {"temperature": "hot"}}}, "sampling.counter.temperature"),
        ({"sampling": SamplingParams(max_tokens=1.5)}, "sampling.counter.max_tokens"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(stop="end")}, "sampling.counter.stop"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(seed=2**70)}, "sampling.counter.seed"),
        ({"sampling": SamplingParams(temperature=np.float32(1))}, "sampling.counter"),  # type: ignore[arg-type]
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids"),
        ({"prompt_token_ids": 5}, "prompt_token_ids"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_wrong_types_are_refused_and_reach_no_worker(system: System, wrong: dict[str, Any], field: str | None) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            before = [pid_of(omni.health(), stage) for stage in omni.card.stages]
            prompt = {**both("typed"), **wrong}
            if "prompt_token_ids" in wrong:
                del prompt["messages"]
            with pytest.raises(InvalidRequest) as caught:
                await omni.generate(prompt)
            assert caught.value.field == field
            assert_right(await omni.generate(both("next")), "next")
            assert [pid_of(omni.health(), stage) for stage in omni.card.stages] == before

    system.run(body)


def test_a_request_that_was_here_already_is_refused(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            request = omni.request(both("once"))
            await omni.output(request)
            with pytest.raises(InvalidRequest, match="was served before") as caught:
                await asyncio.wait_for(omni.output(request), 60)
            assert caught.value.field == "request_id"
            assert_right(await omni.generate(both("another")), "another")
            assert not any(request.request_id in one.reading for one in omni.orchestrator.replicas.all)

    system.run(body)
