"""The stage graph of Flux. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.diffusion.graph import denoise

KONTEXT = "FluxKontextPipeline"
"""The pipeline that edits."""


def graph(config: dict[str, Any]) -> StageGraph:
    """Stages of a checkpoint, from its `model_index.json`."""
    g = StageGraph("flux")
    g.stage("clip_encoder", "module", takes={"text"}, fuse_with="t5_encoder")
    g.stage("t5_encoder", "module", takes={"text"})
    g.stage("vae_encoder", "module", takes={"image"}, fuse_with="decoder")  # for requests that bring one
    denoise(g, gives="image")
    return g
