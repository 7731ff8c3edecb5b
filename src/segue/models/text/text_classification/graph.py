"""The stage graph of a text classifier: one stage. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint: a text becomes a number per class."""
    g = StageGraph("text_classification")
    g.stage("classifier", "module", takes={"text"}, gives={"classes"}, tensors={""})
    return g
