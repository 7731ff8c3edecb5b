"""The stage graph of Qwen-Image. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.diffusion.graph import denoise
from segue.models.diffusion.sizes import Sizes, config_of

EDITING = ("QwenImageEditPipeline", "QwenImageEditPlusPipeline")
"""Pipelines that work on pictures."""
PLACES = 4096
"""Positions that the network knows (diffusers' `QwenEmbedRope`): of tokens on each side of a picture's middle, and of
the text, whose first is where the longest side of a picture ends."""
LONGEST = 1024
"""Tokens of a prompt, where no picture is edited."""


def graph(config: dict[str, Any]) -> StageGraph:
    """Stages of a checkpoint, from its `model_index.json`."""
    edits = config.get("_class_name") in EDITING
    g = StageGraph("qwen_image")
    g.stage("text_encoder", "module", takes={"text", "image"} if edits else {"text"})
    # without editing, for requests that bring a picture to begin with
    g.stage("vae_encoder", "module", takes={"image"}, fuse_with=None if edits else "decoder")
    denoise(g, gives="image")
    return g


def sizes(config: dict[str, Any], model_dir: Path) -> Sizes:
    """What it makes. Raises `ConfigError`."""
    multiple = 2 * pixels_per_latent(model_dir)
    edits = config.get("_class_name") in EDITING  # whose longest side hangs on the text
    return Sizes(multiple, largest_side=None if edits else 2 * (PLACES - LONGEST) * multiple)


def pixels_per_latent(model_dir: Path) -> int:
    """In height and in width, from the VAE's config."""
    return int(2 ** len(config_of(model_dir, "vae").get("temperal_downsample", (False, True, True))))
