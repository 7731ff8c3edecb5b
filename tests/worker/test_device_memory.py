"""How much of a GPU a stage may use, where what was planned with is not what its worker sees."""

from __future__ import annotations

import pytest
import torch

from segue.graph.kinds.autoregressive import AutoregressivePlan
from segue.worker.process.device import on_device


def planned(share: float, size: int) -> AutoregressivePlan:
    return AutoregressivePlan(
        name="llm",
        engine="autoregressive",
        devices=("cuda:0",),
        replicas=1,
        memory_share=share,
        memory_bytes=size,
        dtype="bfloat16",
        threads=1,
        max_batch=8,
    )


@pytest.mark.parametrize(
    ("share", "size", "expected"),
    [
        pytest.param(0.5, 40_000, 5_000, id="an instance of the GPU that was planned with"),
        pytest.param(0.5, 0, 5_000, id="a GPU whose memory was not known"),
        pytest.param(0.5, 4_000, 4_000, id="less planned"),
        pytest.param(0.0, 0, 0, id="nothing to be sized"),
    ],
)
def test_no_more_than_its_share_of_what_is_there(share: float, size: int, expected: int) -> None:
    plan = on_device(planned(share, size), torch.device("cuda:0"), lambda device: 10_000)
    assert plan.memory_bytes == expected


def test_on_a_cpu_the_plan_stays() -> None:
    plan = planned(0.5, 4_000)
    assert on_device(plan, torch.device("cpu")) is plan
