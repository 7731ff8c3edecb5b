"""The stage graph of Flux. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import INPUT, StageGraph


def graph(config: dict[str, Any]) -> StageGraph:
    """Stages of a checkpoint, from its `model_index.json`."""
    g = StageGraph("flux")
    g.stage("clip_encoder", "module", takes={"text"}, fuse_with="t5_encoder")
    g.stage("t5_encoder", "module", takes={"text"})
    g.stage("vae_encoder", "module", takes={"image"}, fuse_with="decoder")  # for requests that bring one
    g.stage("denoiser", "diffusion")
    g.stage("decoder", "module", gives={"image"})
    g.edge(INPUT, "denoiser")  # what is asked for: size, steps, guidance
    g.edge("clip_encoder", "denoiser")
    g.edge("t5_encoder", "denoiser")
    g.edge("vae_encoder", "denoiser")
    g.edge("denoiser", "decoder")  # a chunk per picture, and per preview
    return g
