"""The stage graph of Qwen-Image. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.shared.diffusion.family import denoise
from segue.models.shared.diffusion.sizes import Sizes, config_of

EDITING = ("QwenImageEditPipeline", "QwenImageEditPlusPipeline")
"""Pipelines that edit images."""
PLACES = 4096
"""Positions that the network has (diffusers' `QwenEmbedRope`): for tokens on each side of an image's centre, and for
the text, which begins where the longest side of an image ends."""
LONGEST = 1024
"""Maximum tokens of a prompt, without editing."""


def graph(config: dict[str, Any]) -> StageGraph:
    """The stages of a checkpoint, from its `model_index.json`."""
    edits = config.get("_class_name") in EDITING
    g = StageGraph("qwen_image")
    g.stage("text_encoder", "module", takes={"text", "image"} if edits else {"text"})
    # without editing, for requests with an input image
    g.stage("vae_encoder", "module", takes={"image"}, fuse_with=None if edits else "decoder")
    denoise(g, gives="image")
    return g


def sizes(config: dict[str, Any], model_dir: Path) -> Sizes:
    """The output sizes. Raises `ConfigError`."""
    multiple = 2 * pixels_per_latent(model_dir)
    edits = config.get("_class_name") in EDITING  # when editing, the longest side depends on the text
    return Sizes(multiple, largest_side=None if edits else 2 * (PLACES - LONGEST) * multiple)


def pixels_per_latent(model_dir: Path) -> int:
    """Pixels per latent in height and in width, from the VAE's config."""
    return int(2 ** len(config_of(model_dir, "vae").get("temperal_downsample", (False, True, True))))
