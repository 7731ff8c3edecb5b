"""The stage graph of BAGEL; read this first. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint. It answers in text; images are not drawn yet, which takes walks that come
    back to a stage."""
    g = StageGraph("bagel")
    g.stage("encoder", "module", takes={"image"}, fuse_with="llm")
    g.stage("llm", "autoregressive", takes={"text"}, gives={"text"}, without={"lora", "speculation"})
    g.edge("encoder", "llm")  # a chunk per image
    return g
