"""The stage graph of Z-Image. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.shared.diffusion.family import denoise
from segue.models.shared.diffusion.sizes import Sizes, config_of, pixels_per_latent


def graph(config: dict[str, Any]) -> StageGraph:
    """The stages of a checkpoint, from its `model_index.json`."""
    g = StageGraph("z_image")
    g.stage("text_encoder", "module", takes={"text"})
    g.stage("vae_encoder", "module", takes={"image"}, fuse_with="decoder")  # for requests with an input image
    denoise(g, gives="image")
    return g


def sizes(config: dict[str, Any], model_dir: Path) -> Sizes:
    """The output sizes. Raises `ConfigError`."""
    _, rows, columns = places_of(model_dir)
    token = 2 * pixels_per_latent(model_dir)
    return Sizes(token, largest_side=token * min(rows, columns))


def places_of(model_dir: Path) -> tuple[int, int, int]:
    """Positions that the network has: along the text, and for rows and columns of an image's tokens."""
    places, rows, columns = config_of(model_dir, "transformer").get("axes_lens", (1024, 512, 512))
    return places, rows, columns
