"""A denoiser divided between processes (its rows, its network, or both), through the whole system: the same image,
whichever of them is killed, or runs out of memory."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from truth_system import System

from segue.messages.deltas import Delta, ProgressDelta
from segue.messages.errors import ConfigError, StageFailed
from segue.orchestrator.omni.outputs import RequestOutput

MiB = 1 << 20
ASKED: dict[str, Any] = {
    "prompt": "a small boat left the harbour",
    "negative_prompt": "grey",
    "height": 64,
    "width": 64,
    "num_inference_steps": 6,
    "seed": 3,
    "progress": True,
}


@pytest.fixture(scope="module")
def truth(qwen_image_dir: Path) -> RequestOutput:
    system = System(qwen_image_dir)
    [output] = system.ask(ASKED)
    system.close()
    return output


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"cfg_parallel": 2}, marks=pytest.mark.nightly),
        pytest.param({"sequence_parallel": 2}, marks=pytest.mark.nightly),
        {"cfg_parallel": 2, "sequence_parallel": 2, "sequence_mode": "ring"},
        pytest.param({"tensor_parallel": 2}, marks=pytest.mark.nightly),
    ],
    ids=["branches", "ulysses", "branches and ring", "weights"],
)
def running(qwen_image_dir: Path, request: pytest.FixtureRequest) -> Iterator[System]:
    system = System(qwen_image_dir, stages={"denoiser": request.param})
    yield system
    system.close()


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    """Sums are rounded in another order in another batch: one level of 255."""
    [mine], [yours] = one.images, other.images
    assert np.abs(np.asarray(mine).astype(int) - np.asarray(yours).astype(int)).max() <= 1


def test_the_same_image(running: System, truth: RequestOutput) -> None:
    [output] = running.ask(ASKED)
    assert_same(output, truth)


def test_nobody_listens_but_on_the_loopback_interface(running: System) -> None:
    for process in (psutil.Process(running.pid("denoiser")), running.follower("denoiser")):
        listening = [one for one in process.net_connections() if one.status == psutil.CONN_LISTEN]
        assert {one.laddr.ip for one in listening} <= {"127.0.0.1"}


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_killed_at_work(running: System, truth: RequestOutput, who: str) -> None:
    async def body() -> RequestOutput:
        leader, second = psutil.Process(running.pid("denoiser")), running.follower("denoiser")
        killed: list[Delta] = []

        def kill(delta: Delta) -> None:
            if isinstance(delta, ProgressDelta) and not killed:
                killed.append(delta)
                running.kill_worker(leader.pid, leader.pid if who == "leader" else second.pid)

        output = await running.collect(ASKED, kill)
        assert killed
        assert_same(output, truth)
        _, alive = await asyncio.to_thread(psutil.wait_procs, [leader, second], timeout=120)
        assert not alive, "neither outlives the other"
        return output

    assert running.in_time(body, lambda output: output.metrics.attempts > 1).metrics.attempts == 2
    assert running.follower("denoiser").is_running()


@pytest.mark.nightly
def test_memory_of_one_process_is_over(running: System, truth: RequestOutput) -> None:
    """Its allocator refuses to map what a large image takes. What its heap has free decides whether that is seen
    before the processes wait for each other: then it is the failure of that request, and of no process; or in between:
    then they start again, and the image is made; or whether the image fits after all."""
    follower = running.follower("denoiser")
    processes = [running.pid("denoiser"), follower.pid]
    limits = resource.prlimit(follower.pid, resource.RLIMIT_AS)
    resource.prlimit(follower.pid, resource.RLIMIT_AS, (follower.memory_info().vms + 4 * MiB, limits[1]))
    large, refused = None, ""
    try:
        [large] = running.ask({**ASKED, "height": 1024, "width": 1024})
    except StageFailed as failed:
        refused = failed.message
    same = [running.pid("denoiser"), running.follower("denoiser").pid] == processes
    if same:
        resource.prlimit(follower.pid, resource.RLIMIT_AS, limits)
    if large is None:
        assert same
        assert "one row of 4096 latent tokens does not fit into the free memory" in refused
    else:
        assert large.metrics.attempts == (1 if same else 2)
        assert large.images[0].size == (1024, 1024)
    [output] = running.ask(ASKED)
    assert_same(output, truth)
    assert output.metrics.attempts == 1


@pytest.mark.nightly  # test_denoiser_sequence and test_denoiser_weights
def test_what_cannot_be_divided_does_not_start(qwen_image_dir: Path) -> None:
    with pytest.raises(ConfigError, match="QwenImageTransformer2DModel cannot be run sequence parallel"):
        System(qwen_image_dir, stages={"denoiser": {"sequence_parallel": 3}})
