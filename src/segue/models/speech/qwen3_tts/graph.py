"""The stage graph of Qwen3-TTS; read this first. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.speech.qwen3_tts.config import config_of


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint. The vocoder starts on the talker's first codes. Raises `ConfigError` for a
    model of another kind than those served."""
    config_of(config, "config.json")
    g = StageGraph("qwen3_tts")
    g.stage("talker", "autoregressive", takes={"text"}, without={"lora", "speculation"})
    g.stage("vocoder", "module", gives={"audio"})
    g.edge("talker", "vocoder")  # a chunk per step of the talker
    return g
