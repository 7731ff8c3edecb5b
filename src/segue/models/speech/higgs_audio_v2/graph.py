"""The stage graph of Higgs Audio v2; read this first. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint. The vocoder starts on the language model's first rows of codes."""
    g = StageGraph("higgs_audio_v2")
    g.stage("llm", "autoregressive", takes={"text"}, without={"lora", "speculation"})
    g.stage("vocoder", "module", gives={"audio"})
    g.edge("llm", "vocoder")  # a chunk per step of the language model
    return g
