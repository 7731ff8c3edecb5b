"""The stage graph of Flux 2. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.shared.diffusion.family import denoise
from segue.models.shared.diffusion.sizes import Sizes, pixels_per_latent


def graph(config: dict[str, Any]) -> StageGraph:
    """The stages of a checkpoint, from its `model_index.json`."""
    g = StageGraph("flux2")
    g.stage("text_encoder", "module", takes={"text"})
    g.stage("vae_encoder", "module", takes={"image"}, fuse_with="decoder")  # for requests with an input image
    denoise(g, gives="image")
    return g


def sizes(config: dict[str, Any], model_dir: Path) -> Sizes:
    """The output sizes. Raises `ConfigError`."""
    return Sizes(2 * pixels_per_latent(model_dir))
