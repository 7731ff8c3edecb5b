"""The stage graph of Qwen-Image. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import INPUT, StageGraph

EDITING = ("QwenImageEditPipeline", "QwenImageEditPlusPipeline")
"""Pipelines that work on pictures."""


def graph(config: dict[str, Any]) -> StageGraph:
    """Stages of a checkpoint, from its `model_index.json`."""
    edits = config.get("_class_name") in EDITING
    g = StageGraph("qwen_image")
    g.stage("text_encoder", "module", takes={"text", "image"} if edits else {"text"})
    if edits:
        g.stage("vae_encoder", "module", takes={"image"})
    g.stage("denoiser", "diffusion")
    g.stage("decoder", "module", gives={"image"})
    g.edge(INPUT, "denoiser")  # what is asked for: size, steps, guidance
    g.edge("text_encoder", "denoiser")
    if edits:
        g.edge("vae_encoder", "denoiser")
    g.edge("denoiser", "decoder")  # a chunk per picture, and per preview
    return g
