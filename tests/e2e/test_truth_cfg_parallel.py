"""A denoiser of two processes through the whole system: the same picture, whichever of them is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from truth_system import System

from segue.messages.deltas import Delta, ProgressDelta
from segue.models.qwen_image import tiny
from segue.orchestrator.outputs import RequestOutput

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
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen-image")
    tiny.make(made)
    return made


@pytest.fixture(scope="module")
def truth(directory: Path) -> RequestOutput:
    system = System(directory)
    [output] = system.ask(ASKED)
    system.close()
    return output


@pytest.fixture(scope="module")
def running(directory: Path) -> Iterator[System]:
    system = System(directory, stages={"denoiser": {"cfg_parallel": 2}})
    yield system
    system.close()


def follower(system: System) -> psutil.Process:
    [process] = psutil.Process(system.pid("denoiser")).children()
    return process


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    """Sums are rounded in another order in another batch: one level of 255."""
    [mine], [yours] = one.images, other.images
    assert np.abs(np.asarray(mine).astype(int) - np.asarray(yours).astype(int)).max() <= 1


def test_the_same_picture(running: System, truth: RequestOutput) -> None:
    [output] = running.ask(ASKED)
    assert_same(output, truth)


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_killed_at_work(running: System, truth: RequestOutput, who: str) -> None:
    leader, second = psutil.Process(running.pid("denoiser")), follower(running)
    killed: list[psutil.Process] = []

    def kill(delta: Delta) -> None:
        if isinstance(delta, ProgressDelta) and not killed:
            killed.append(leader if who == "leader" else second)
            killed[0].kill()

    output = running.run(running.collect(ASKED, kill))
    assert killed
    assert_same(output, truth)
    assert output.metrics.attempts == 2
    _, alive = psutil.wait_procs([leader, second], timeout=30)
    assert not alive, "neither outlives the other"
    assert follower(running).is_running()
