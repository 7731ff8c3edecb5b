"""Faults of processes on the toy family that no request may wait for in vain."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_system import Gate, assert_right, both, collect, kill, pid_of

from segue.messages.errors import ShuttingDown, StageLost
from segue.orchestrator.omni.async_omni import AsyncOmni

pytestmark = pytest.mark.usefixtures("toy_path")


def run(body: Any) -> None:
    asyncio.run(asyncio.wait_for(body(), timeout=600))


def test_a_payload_that_could_not_be_kept_makes_its_stage_run_again(toy_dir: Path, tmp_path: Path) -> None:
    """The counter's worker can write no file, so what it should retain for the tone is lost when the tone dies."""

    async def body() -> None:
        gate = Gate(tmp_path)
        async with AsyncOmni(toy_dir, config={"limits": {"retained_bytes": 64}}) as omni:
            resource.prlimit(pid_of(omni.health(), "counter"), resource.RLIMIT_FSIZE, (0, 0))
            task = asyncio.create_task(collect(omni, both("no disk", hold=gate.option("tone", 12))))
            held = await gate.reached()
            await kill(pid_of(omni.health(), "tone"))
            gate.remove()
            os.close(held)
            output = await task
            assert_right(output, "no disk")
            assert output.metrics.attempts == 3, "the death, and the loss that was found after it"

    run(body)


def test_a_worker_that_hangs_is_killed_and_its_request_goes_on(toy_dir: Path, tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        # a worker that a busy machine keeps waiting for so long is killed, too: that must not use up the retries
        async with AsyncOmni(toy_dir, config={"limits": {"hang_seconds": 2, "max_retries": 20}}) as omni:
            task = asyncio.create_task(collect(omni, both("hang", hold=gate.option("tone", 5))))
            held = await gate.reached()
            pid = pid_of(omni.health(), "tone")
            gate.remove()  # the next attempt does not stop there; this one hangs for ever
            assert_right(await task, "hang")
            os.close(held)
            assert pid_of(omni.health(), "tone") != pid

    run(body)


@pytest.mark.parametrize("stage", ["forward", pytest.param("tone", marks=pytest.mark.nightly)])
def test_a_worker_whose_device_is_lost_ends_and_its_requests_go_on(
    toy_dir: Path, tmp_path: Path, stage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """An autoregressive and a module stage; neither answers with the error, which every later call would give."""

    async def body() -> None:
        once = tmp_path / "once"
        once.touch()
        async with AsyncOmni(toy_dir) as omni:
            name = "counter" if stage == "forward" else stage
            pid = pid_of(omni.health(), name)
            lost = collect(omni, both("device", lost_at={"stage": stage, "at": 8, "once": str(once)}))
            output, other = await asyncio.gather(lost, collect(omni, both("bystander")))
            assert_right(output, "device")
            assert_right(other, "bystander")
            assert output.metrics.attempts == 2
            assert pid_of(omni.health(), name) != pid

    run(body)
    said = "ends: the device reported AcceleratorError: CUDA error: an illegal memory access was encountered; it takes"
    assert said in capfd.readouterr().err


def test_a_stage_that_cannot_come_back_fails_its_requests_and_health_says_so(toy_dir: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with AsyncOmni(toy_dir) as omni:
            assert_right(await omni.generate(both("all is well")), "all is well")
            sockets = Path(omni.orchestrator.runtime_dir)
            gone = pid_of(omni.health(), "tone")
            # a restarted worker binds its sockets in this directory: without it none starts
            sockets.rename(tmp_path / "moved")
            await kill(gone)
            with pytest.raises(StageLost, match="could not be restarted"):
                await omni.generate(both("x"))
            assert not omni.health().ready
            assert omni.health().stages["tone"].state == "failed"
            assert_right(await omni.generate("text still works"), "text still works")
            (tmp_path / "moved").rename(sockets)

    run(body)


def test_a_fork_server_that_cannot_come_back_fails_every_request(
    toy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        async with AsyncOmni(toy_dir) as omni:
            task = asyncio.create_task(collect(omni, both("x", hold=gate.option("tone", 5))))
            held = await gate.reached()
            monkeypatch.setattr("sys.executable", "/nowhere/python")
            os.kill(psutil.Process(pid_of(omni.health(), "tone")).ppid(), signal.SIGKILL)
            with pytest.raises(Exception, match="nowhere"):
                await task
            os.close(held)
            assert not omni.health().ready
            with pytest.raises(StageLost):
                await omni.generate("x")

    run(body)


@pytest.mark.parametrize(
    "place", [pytest.param(0, marks=pytest.mark.nightly), 1, pytest.param(2, marks=pytest.mark.nightly)]
)
def test_who_kills_its_worker_is_lost_alone(toy_dir: Path, place: int) -> None:
    """Three requests are in the worker each time that one of them kills it; the two others are answered."""

    async def body() -> None:
        async with AsyncOmni(toy_dir) as omni:
            prompts = [both("one neighbour"), both("another neighbour")]
            prompts.insert(place, both("poison", die_at={"stage": "tone", "at": 0}))
            tasks = [asyncio.create_task(collect(omni, prompt)) for prompt in prompts]
            poison = tasks.pop(place)
            with pytest.raises(StageLost, match="'tone' was lost 3 times"):
                await poison
            for task, text in zip(tasks, ["one neighbour", "another neighbour"], strict=True):
                assert_right(await task, text)

    run(body)


def test_stopping_twice_and_asking_after_it(toy_dir: Path) -> None:
    async def body() -> None:
        omni = AsyncOmni(toy_dir)
        await omni.start()
        await omni.stop()
        await omni.stop()
        assert not omni.health().ready
        with pytest.raises(ShuttingDown):
            await omni.generate("x")

    run(body)


def test_the_numbers_of_a_dead_worker_are_not_kept(toy_dir: Path) -> None:
    async def body() -> None:
        async with AsyncOmni(toy_dir) as omni:
            for number in range(3):
                text = f"round {number}"
                assert_right(await omni.generate(both(text)), text)
                await kill(pid_of(omni.health(), "counter"))
            assert_right(await omni.generate(both("end")), "end")
            lines = [line for line in omni.metrics().decode().splitlines() if not line.startswith("#")]
            names = [line.rpartition(" ")[0] for line in lines]
            assert len(names) == len(set(names))

    run(body)
