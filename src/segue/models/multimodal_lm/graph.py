"""The stage graph of a language model that sees or hears: two stages. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph


def kinds_of(config: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of media that a checkpoint's `config.json` has an encoder for."""
    kinds = []
    if config.get("vision_config") is not None:  # null in checkpoints of a type that has larger ones without
        kinds.append("image")
        if "video_token_id" in config or "video_token_index" in config:
            kinds.append("video")
    if config.get("audio_config") is not None:
        kinds.append("audio")
    return tuple(kinds)


def graph(config: dict[str, Any]) -> StageGraph:
    """Stages of a checkpoint, from its `config.json`."""
    g = StageGraph("multimodal_lm")
    g.stage("encoder", "module", takes=set(kinds_of(config)), fuse_with="llm")
    g.stage("llm", "autoregressive", takes={"text"}, gives={"text"}, divisible=True)
    g.edge("encoder", "llm")  # a chunk per medium
    return g
