"""The stage graph of a cross-encoder: one stage. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint: two texts become one number."""
    g = StageGraph("cross_encoder")
    g.stage("scorer", "module", takes={"text"}, gives={"score"}, tensors={""})
    return g
