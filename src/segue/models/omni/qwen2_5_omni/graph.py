"""The stage graph of Qwen2.5-Omni; read this first. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph

_TOWERS = ("thinker.visual.", "thinker.audio_tower.", "thinker.model.visual.", "thinker.model.audio_tower.")


def graph(config: dict[str, Any]) -> StageGraph:
    """The stages of a checkpoint, from its `config.json`.

    The talker starts on the thinker's first token, the vocoder on the talker's first codes. A checkpoint with
    `enable_audio_output: false` contains neither talker nor vocoder.
    """
    g = StageGraph("qwen2_5_omni")
    g.stage("encoder", "module", takes={"image", "audio", "video"}, fuse_with="thinker", tensors=_TOWERS)
    g.stage("thinker", "autoregressive", takes={"text"}, gives={"text"}, divisible=True, tensors={"thinker."})
    g.edge("encoder", "thinker")  # a chunk per image, clip or recording
    if config.get("enable_audio_output", True):
        # a code's row comes from the thinker, so codes cannot be drafted
        g.stage("talker", "autoregressive", divisible=True, without={"lora", "speculation"}, tensors={"talker."})
        g.stage("vocoder", "module", gives={"audio"}, tensors={"token2wav."})
        g.edge("thinker", "talker")  # a chunk per step of the thinker
        g.edge("talker", "vocoder")  # a chunk per step of the talker
    return g
