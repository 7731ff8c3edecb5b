from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from segue.graph.deployment.deployment import Hardware, Plan
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import StageGraph

GiB = 1 << 30


def omni_graph(*, fuse: bool = False) -> StageGraph:
    """A graph shaped like Qwen2.5-Omni's, its encoder a stage of its own."""
    graph = StageGraph("omni")
    graph.stage("encoder", "module", takes={"image", "audio", "video"}, fuse_with="thinker" if fuse else None)
    graph.stage("thinker", "autoregressive", takes={"text"}, gives={"text"})
    graph.stage("talker", "autoregressive")
    graph.stage("vocoder", "module", gives={"audio"})
    graph.edge("encoder", "thinker")
    graph.edge("thinker", "talker")
    graph.edge("talker", "vocoder")
    return graph


@pytest.fixture(scope="session")
def make_graph() -> Callable[..., StageGraph]:
    return omni_graph


@pytest.fixture
def graph() -> StageGraph:
    return omni_graph()


@pytest.fixture
def fused_graph() -> StageGraph:
    return omni_graph(fuse=True)


@pytest.fixture
def laptop() -> Hardware:
    return Hardware(cpus=2, memory_bytes=16 * GiB)


@pytest.fixture
def two_gpus() -> Hardware:
    return Hardware(cpus=16, memory_bytes=128 * GiB, gpus=(80 * GiB, 80 * GiB))


@pytest.fixture
def plan(graph: StageGraph, two_gpus: Hardware) -> Callable[..., Plan]:
    """Lay a parsed deployment over the graph, on a machine with two GPUs."""

    def lay(deployment: dict[str, Any] | None = None, **changes: Any) -> Plan:
        return load_plan(**{"graph": graph, "deployment": deployment, "hardware": two_gpus, **changes})

    return lay
