"""input → counter (autoregressive, text and rows) → talker (autoregressive, rows of codes) → tones (module, audio)."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.family import Family

ARCHITECTURE = "ToyRowsForConditionalGeneration"


def graph(config: dict[str, Any]) -> StageGraph:
    g = StageGraph("toy_rows")
    g.stage("counter", "autoregressive", takes={"text"}, gives={"text"})
    g.stage("talker", "autoregressive")
    g.stage("tones", "module", gives={"audio"})
    g.edge("counter", "talker")
    g.edge("talker", "tones")
    return g


FAMILY = Family(
    name="toy_rows",
    architectures=frozenset({ARCHITECTURE}),
    graph=graph,
    stages_module="segue_toy.rows.stages",
    options=frozenset({"hold"}),
)
