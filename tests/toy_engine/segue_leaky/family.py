"""input → sum (leaky, an embedding of one number)."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.family import Family


def graph(config: dict[str, Any]) -> StageGraph:
    g = StageGraph("leaky")
    g.stage("sum", "leaky", takes={"text"}, gives={"embedding"})
    return g


FAMILY = Family(
    name="leaky",
    architectures=frozenset({"LeakyModel"}),
    graph=graph,
    stages_module="segue_leaky.stages",
)
