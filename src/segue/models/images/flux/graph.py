"""The stage graph of Flux. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.shared.diffusion.family import denoise
from segue.models.shared.diffusion.sizes import Sizes, pixels_per_latent

KONTEXT = "FluxKontextPipeline"
"""The pipeline class for editing."""


def graph(config: dict[str, Any]) -> StageGraph:
    """The stages of a checkpoint, from its `model_index.json`."""
    g = StageGraph("flux")
    g.stage("clip_encoder", "module", takes={"text"}, fuse_with="t5_encoder")
    g.stage("t5_encoder", "module", takes={"text"})
    g.stage("vae_encoder", "module", takes={"image"}, fuse_with="decoder")  # for requests with an input image
    denoise(g, gives="image")
    return g


def sizes(config: dict[str, Any], model_dir: Path) -> Sizes | None:
    """The output sizes; None for the editing pipeline, which adjusts any size. Raises `ConfigError`."""
    return None if config.get("_class_name") == KONTEXT else sizes_of(model_dir)


def sizes_of(model_dir: Path) -> Sizes:
    """The output sizes that the network supports."""
    return Sizes(2 * pixels_per_latent(model_dir))
