"""The stage graph of MiMo-Audio; read this first. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.speech.mimo_audio.config import config_of


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint. The vocoder starts as soon as the language model has drawn enough frames.
    Raises `ConfigError` for a model that cannot be served."""
    config_of(config, "config.json")
    g = StageGraph("mimo_audio")
    g.stage("encoder", "module", takes={"audio"}, fuse_with="llm")
    g.stage("llm", "autoregressive", takes={"text"}, gives={"text"}, without={"lora", "speculation"})
    g.stage("vocoder", "module", gives={"audio"})
    g.edge("encoder", "llm")  # a chunk per recording of the conversation
    g.edge("llm", "vocoder")  # a chunk per step of the language model
    return g
