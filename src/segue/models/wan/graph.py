"""The stage graph of Wan. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.diffusion.graph import denoise
from segue.models.diffusion.sizes import Sizes, config_of


def sees(index: dict[str, Any]) -> bool:
    """Whether a checkpoint makes video from pictures, by its `model_index.json`: those of that pipeline do, and TI2V,
    which gives each token a timestep of its own."""
    return index.get("_class_name") == "WanImageToVideoPipeline" or bool(index.get("expand_timesteps"))


def has_part(index: dict[str, Any], name: str) -> bool:
    """Whether `model_index.json` names a class for a part: those that are left out are [null, null]."""
    part = index.get(name)
    return isinstance(part, list) and len(part) == 2 and part[1] is not None


def graph(config: dict[str, Any]) -> StageGraph:
    """Stages of a checkpoint, from its `model_index.json`."""
    g = StageGraph("wan")
    g.stage("text_encoder", "module", takes={"text"})
    pictures = []
    if sees(config):
        pictures.append("vae_encoder")
    if has_part(config, "image_encoder"):
        pictures.append("image_encoder")  # CLIP, of Wan 2.1
    for name in pictures:
        g.stage(name, "module", takes={"image"})
    denoise(g, gives="video")
    return g


def sizes(config: dict[str, Any], model_dir: Path) -> Sizes:
    """What it makes. Raises `ConfigError`."""
    vae, network = config_of(model_dir, "vae"), config_of(model_dir, "transformer")
    multiple = vae.get("scale_factor_spatial", 8) * network.get("patch_size", (1, 2, 2))[1]
    largest = network.get("rope_max_seq_len", 1024) * multiple
    return Sizes(multiple, largest_side=largest, frame_step=vae.get("scale_factor_temporal", 4))
