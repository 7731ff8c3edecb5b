"""The stage graph of Stable Diffusion 3. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.shared.diffusion.family import denoise
from segue.models.shared.diffusion.sizes import Sizes, config_of, pixels_per_latent


def graph(config: dict[str, Any]) -> StageGraph:
    """The stages of a checkpoint, from its `model_index.json`: T5 is optional."""
    g = StageGraph("stable_diffusion_3")
    has_t5 = reads_with_t5(config)
    g.stage("clip_encoder", "module", takes={"text"}, fuse_with="t5_encoder" if has_t5 else None)
    if has_t5:
        g.stage("t5_encoder", "module", takes={"text"})
    g.stage("vae_encoder", "module", takes={"image"}, fuse_with="decoder")  # for requests with an input image
    denoise(g, gives="image")
    return g


def reads_with_t5(config: dict[str, Any]) -> bool:
    """Whether the checkpoint has the third text encoder."""
    return (config.get("text_encoder_3") or [None, None])[1] is not None


def sizes(config: dict[str, Any], model_dir: Path) -> Sizes:
    """The output sizes. Raises `ConfigError`."""
    transformer = config_of(model_dir, "transformer")
    token = transformer.get("patch_size", 2) * pixels_per_latent(model_dir)
    return Sizes(token, largest_side=transformer.get("pos_embed_max_size", 96) * token)
