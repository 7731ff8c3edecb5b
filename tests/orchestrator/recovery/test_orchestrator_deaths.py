"""Processes of a running system are killed: what was asked of them comes all the same, and once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest
from toy_system import Gate, System, assert_right, both, collect, kill, pid_of

from segue.messages.errors import (
    StageLost,
)
from segue.messages.sampling import SamplingParams
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.requests.request_state import RequestState

pytestmark = pytest.mark.usefixtures("toy_path")


@pytest.mark.parametrize(("stage", "at"), [("counter", 7), ("tone", 0), ("tone", 12)])
def test_a_killed_worker_comes_back_and_requests_finish(system: System, tmp_path: Path, stage: str, at: int) -> None:
    """kill -9 in the middle of the stage: same text, same samples, nothing twice; other requests go on."""

    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.shared() as omni:
            bystander = both("bystander")
            task = asyncio.create_task(collect(omni, both("kill me", hold=gate.option(stage, at))))
            held = await gate.reached()
            other = asyncio.create_task(omni.generate(bystander))
            pid = pid_of(omni.health(), stage)
            restarts = omni.health().stages[stage].replicas[0].restarts
            await kill(pid)
            gate.remove()
            os.close(held)
            output = await task
            assert_right(output, "kill me")
            assert output.metrics.attempts == 2
            assert_right(await other, "bystander")
            health = omni.health()
            assert health.ready
            assert pid_of(health, stage) != pid
            assert health.stages[stage].replicas[0].restarts == restarts + 1

    system.run(body)


def test_a_killed_input_worker_comes_back(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            await kill(pid_of(omni.health(), "input"))
            assert_right(await omni.generate(both("after the input died")), "after the input died")

    system.run(body)


def test_a_killed_fork_server_is_replaced(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            server = psutil.Process(pid_of(omni.health(), "input")).parent()
            assert server is not None
            await kill(server.pid)
            assert_right(await omni.generate(both("all gone")), "all gone")

    system.run(body)


def test_retries_are_bounded_and_the_error_names_the_stage(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.own(limits={"max_retries": 1}) as omni:
            task = asyncio.create_task(collect(omni, both("doomed", hold=gate.option("tone", 3))))
            for _ in range(2):
                held = await gate.reached()
                await kill(pid_of(omni.health(), "tone"), held)
            with pytest.raises(StageLost, match="'tone'") as caught:
                await task
            assert caught.value.stage == "tone"
            gate.remove()
            assert_right(await omni.generate(both("next")), "next")

    system.run(body)


def test_a_sibling_takes_over(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.own(stages={"tone": {"replicas": 2}}) as omni:
            before = {replica.pid for replica in omni.health().stages["tone"].replicas}
            assert len(before) == 2
            task = asyncio.create_task(collect(omni, both("twins", hold=gate.option("tone", 5))))
            held = await gate.reached()
            busy = next(r for r in omni.orchestrator.replicas.all if r.group == ("tone",) and r.requests)
            assert busy.pid is not None
            await kill(busy.pid)
            gate.remove()
            os.close(held)
            assert_right(await task, "twins")

    system.run(body)


def test_all_requests_of_a_dead_worker_go_to_its_sibling_at_once(system: System, tmp_path: Path) -> None:
    """kill -9 of one of two under load: they do not wait for its replacement, and nothing is lost or sent twice."""

    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.own(stages={"counter": {"replicas": 2}, "tone": {"replicas": 2}}) as omni:
            workers = omni.orchestrator.replicas.of_group(("counter",))
            while any(worker.state != "ready" for worker in workers):
                await asyncio.sleep(0)
            held = asyncio.create_task(collect(omni, both("held", hold=gate.option("counter", 5))))
            end = await gate.reached()
            texts = [f"load {number}" for number in range(12)]
            tasks = [asyncio.create_task(collect(omni, both(text))) for text in texts]
            [busy] = [worker for worker in workers if any(r.id in worker.working for r in running(omni, "held"))]
            [sibling] = [worker for worker in workers if worker is not busy]
            while len(busy.working) < 3:
                await asyncio.sleep(0)
            pid, worker = busy.pid, busy.worker
            assert pid is not None
            await kill(pid, end)
            while busy.worker == worker:
                await asyncio.sleep(0)
            assert {request.stages["counter"].worker for request in running(omni)} == {sibling.worker}
            gate.remove()
            assert_right(await held, "held")
            for task, text in zip(tasks, texts, strict=True):
                assert_right(await task, text)

    system.run(body)


def running(omni: AsyncOmni, text: str = "") -> list[RequestState]:
    """The requests that run, with this text."""
    states = list(omni.orchestrator.requests.values())
    return [one for one in states if text in "".join(map(str, one.request.messages[0].content))]


@pytest.mark.parametrize("at", [0, 6])
def test_what_is_told_of_tokens_is_told_once_though_a_worker_dies(system: System, tmp_path: Path, at: int) -> None:
    sampling = SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=1)

    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.shared() as omni:
            hold = {"hold": gate.option("counter", at)}
            prompt = {**both("hello"), "options": hold, "sampling": sampling, "return_prompt_ids": True}
            asking = asyncio.create_task(omni.generate(prompt))
            held = await gate.reached()
            await kill(pid_of(omni.health(), "counter"))
            gate.remove()
            os.close(held)
            output = await asking
        assert_right(output, "hello", 12)
        assert output.metrics.attempts == 2
        assert [one.chosen.token_id for one in output.logprobs] == output.token_ids["counter"]
        assert all(one.chosen.rank == 1 and len(one.top) == 2 for one in output.logprobs)
        assert len(output.prompt_token_ids) == 5
        of_prompt = [one and one.chosen.token_id for one in output.prompt_logprobs]
        assert of_prompt == [None, *output.prompt_token_ids[1:]]

    system.run(body)
