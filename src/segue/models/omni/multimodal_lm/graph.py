"""The stage graph of a language model with image, video or audio inputs: two stages. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph


def kinds_of(config: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of media that a checkpoint's `config.json` has an encoder for."""
    kinds = []
    # null in checkpoints without vision whose type also has larger ones with it
    if config.get("vision_config") is not None:
        kinds.append("image")
        if "video_token_id" in config or "video_token_index" in config:
            kinds.append("video")
    if config.get("audio_config") is not None:
        kinds.append("audio")
    return tuple(kinds)


def graph(config: dict[str, Any]) -> StageGraph:
    """The stages of a checkpoint, from its `config.json`."""
    g = StageGraph("multimodal_lm")
    g.stage("encoder", "module", takes=set(kinds_of(config)), fuse_with="llm")
    g.stage("llm", "autoregressive", takes={"text"}, gives={"text"}, divisible=True)
    g.edge("encoder", "llm")  # a chunk per medium
    return g
