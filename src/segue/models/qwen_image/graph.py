"""The stage graph of Qwen-Image. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.diffusion.graph import denoise

EDITING = ("QwenImageEditPipeline", "QwenImageEditPlusPipeline")
"""Pipelines that work on pictures."""


def graph(config: dict[str, Any]) -> StageGraph:
    """Stages of a checkpoint, from its `model_index.json`."""
    edits = config.get("_class_name") in EDITING
    g = StageGraph("qwen_image")
    g.stage("text_encoder", "module", takes={"text", "image"} if edits else {"text"})
    # without editing, for requests that bring a picture to begin with
    g.stage("vae_encoder", "module", takes={"image"}, fuse_with=None if edits else "decoder")
    denoise(g, gives="image")
    return g
