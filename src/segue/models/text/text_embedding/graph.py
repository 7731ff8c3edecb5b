"""The stage graph of a text embedding model: one stage. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint: a text becomes one vector."""
    g = StageGraph("text_embedding")
    g.stage("embedder", "module", takes={"text"}, gives={"embedding"}, tensors={""})
    return g
