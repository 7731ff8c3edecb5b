"""What a further worker of each stage would cost in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.graph.deployment.deployment import Hardware, Plan
from segue.graph.machine.further import further_workers
from segue.graph.stage_graph import StageGraph

GiB = 1 << 30
SHARES = {"encoder": 0.1, "thinker": 0.4, "talker": 0.2, "vocoder": 0.1}
WEIGHTS = {"encoder": GiB, "thinker": 2 * GiB, "talker": GiB}


def rows(plan: Plan, weights: dict[str, int]) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table(plan, weights)]
    return {row[0]: row[1:] for row in cells}


def table(plan: Plan, weights: dict[str, int]) -> list[str]:
    return further_workers(plan, weights).splitlines()


def deployment(**more: Any) -> dict[str, Any]:
    return {"stages": {name: {"memory_share": share, **more} for name, share in SHARES.items()}}


def test_on_a_cpu_it_has_the_weights_already(plan: Callable[..., Plan]) -> None:
    found = rows(plan(deployment(), hardware=Hardware(4, 10 * GiB)), WEIGHTS)
    assert found["thinker"] == ["shared (2.0 GiB)", "at most 1.6 GiB", "at most 410 MiB", "at most 2.0 GiB"]
    assert found["encoder"] == ["shared (1.0 GiB)", "-", "-", "-"]
    assert found["vocoder"] == ["shared (not known)", "not known", "not known", "at most 1.0 GiB"]
    assert found.keys().isdisjoint(("input", "output")), "they have no weights"


def test_on_a_gpu_it_has_them_if_a_worker_there_has(plan: Callable[..., Plan]) -> None:
    two = Hardware(4, 10 * GiB, (10 * GiB, 10 * GiB))
    found = rows(plan(deployment(devices="cuda:0"), hardware=Hardware(4, 10 * GiB, (10 * GiB,))), WEIGHTS)
    assert found["thinker"] == ["shared (2.0 GiB)", "at most 1.6 GiB", "at most 410 MiB", "at most 2.0 GiB"]
    unknown = rows(plan(deployment(devices="cuda:0"), hardware=Hardware(4, 10 * GiB, (0,))), WEIGHTS)
    assert unknown["thinker"] == ["shared (2.0 GiB)", "not known", "not known", "not known"]
    third = rows(plan(deployment(devices=["cuda:0", "cuda:1"]), hardware=two), WEIGHTS)
    assert third["thinker"][0] == "shared (2.0 GiB)", "it is the second one on cuda:0"


def test_on_another_host_and_with_several_processes_it_has_its_own(plan: Callable[..., Plan]) -> None:
    graph, three = StageGraph("two"), Hardware(4, 10 * GiB, (10 * GiB,) * 3)
    graph.stage("thinker", "autoregressive", takes={"text"}, gives={"text"})
    graph.stage("talker", "autoregressive", gives={"audio"}, divisible=True)
    graph.edge("thinker", "talker")
    stages = {
        "thinker": {"devices": ["cuda:0", "cuda:1", "cuda:2"], "node": ["server", "node1"]},
        "talker": {"devices": ["cuda:0", "cuda:1"], "tensor_parallel": 2},
    }
    found = rows(plan({"stages": stages}, graph=graph, hardware=three), WEIGHTS)
    assert found["thinker"][0] == "2.0 GiB", "it is the first one on cuda:0 of node1"
    assert found["talker"][0] == "1.0 GiB"


def test_stages_of_one_worker_are_one_row(plan: Callable[..., Plan]) -> None:
    values = deployment()
    values["stages"]["encoder"]["fuse_with"] = "thinker"
    found = rows(plan(values, hardware=Hardware(4, 10 * GiB)), WEIGHTS)
    assert found["encoder + thinker"] == ["shared (3.0 GiB)", "at most 1.6 GiB", "at most 410 MiB", "at most 2.0 GiB"]
