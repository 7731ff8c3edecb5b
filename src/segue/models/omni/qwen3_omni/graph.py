"""The stage graph of Qwen3-Omni; read this first. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph


def graph(config: dict[str, Any]) -> StageGraph:
    """The stages of a checkpoint, from its `config.json`. Replies are text: the talker is not served."""
    g = StageGraph("qwen3_omni")
    g.stage("encoder", "module", takes={"image", "audio", "video"}, fuse_with="thinker")
    g.stage("thinker", "autoregressive", takes={"text"}, gives={"text"})
    g.edge("encoder", "thinker")  # a chunk per image, clip or recording
    return g
