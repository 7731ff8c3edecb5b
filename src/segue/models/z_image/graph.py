"""The stage graph of Z-Image. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import INPUT, StageGraph


def graph(config: dict[str, Any]) -> StageGraph:
    """Stages of a checkpoint, from its `model_index.json`."""
    g = StageGraph("z_image")
    g.stage("text_encoder", "module", takes={"text"})
    g.stage("denoiser", "diffusion")
    g.stage("decoder", "module", gives={"image"})
    g.edge(INPUT, "denoiser")  # what is asked for: size, steps, guidance
    g.edge("text_encoder", "denoiser")
    g.edge("denoiser", "decoder")  # a chunk per picture, and per preview
    return g
