"""The stage graph of CSM; read this first. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint. The vocoder starts on the backbone's first rows of codes."""
    g = StageGraph("csm")
    g.stage("encoder", "module", takes={"audio"}, fuse_with="backbone")
    g.stage("backbone", "autoregressive", takes={"text"}, without={"lora", "speculation"})
    g.stage("vocoder", "module", gives={"audio"})
    g.edge("encoder", "backbone")  # a chunk per recording of the conversation
    g.edge("backbone", "vocoder")  # a chunk per step of the backbone
    return g
