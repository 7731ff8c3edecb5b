"""The stage graph of Wan. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.shared.diffusion.family import denoise
from segue.models.shared.diffusion.sizes import Sizes, config_of


def sees(index: dict[str, Any]) -> bool:
    """Whether a checkpoint generates video from images, by its `model_index.json`: checkpoints of the image-to-video
    pipeline, and TI2V, which has a timestep per token."""
    return index.get("_class_name") == "WanImageToVideoPipeline" or bool(index.get("expand_timesteps"))


def has_part(index: dict[str, Any], name: str) -> bool:
    """Whether `model_index.json` names a class for a part: omitted parts are [null, null]."""
    part = index.get(name)
    return isinstance(part, list) and len(part) == 2 and part[1] is not None


def graph(config: dict[str, Any]) -> StageGraph:
    """The stages of a checkpoint, from its `model_index.json`."""
    g = StageGraph("wan")
    g.stage("text_encoder", "module", takes={"text"})
    images = []
    if sees(config):
        images.append("vae_encoder")
    if has_part(config, "image_encoder"):
        images.append("image_encoder")  # CLIP, in Wan 2.1
    for name in images:
        g.stage(name, "module", takes={"image"})
    denoise(g, gives="video")
    return g


def sizes(config: dict[str, Any], model_dir: Path) -> Sizes:
    """The output sizes. Raises `ConfigError`."""
    vae, network = config_of(model_dir, "vae"), config_of(model_dir, "transformer")
    multiple = vae.get("scale_factor_spatial", 8) * network.get("patch_size", (1, 2, 2))[1]
    largest = network.get("rope_max_seq_len", 1024) * multiple
    return Sizes(multiple, largest_side=largest, frame_step=vae.get("scale_factor_temporal", 4))
