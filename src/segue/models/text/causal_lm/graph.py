"""The stage graph of a language model: one stage. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint: one decoder from text to text."""
    g = StageGraph("causal_lm")
    g.stage("llm", "autoregressive", takes={"text"}, gives={"text"}, divisible=True, tensors={""})
    return g
