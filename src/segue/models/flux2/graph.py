"""The stage graph of Flux 2. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.diffusion.graph import denoise


def graph(config: dict[str, Any]) -> StageGraph:
    """Stages of a checkpoint, from its `model_index.json`."""
    g = StageGraph("flux2")
    g.stage("text_encoder", "module", takes={"text"})
    g.stage("vae_encoder", "module", takes={"image"}, fuse_with="decoder")  # for requests that bring one
    denoise(g, gives="image")
    return g
