"""Registers Qwen-Image. No torch here."""

from __future__ import annotations

from segue.models.images.qwen_image.graph import EDITING, graph, sizes
from segue.models.shared.diffusion.family import pipeline_family

FAMILY = pipeline_family(
    "qwen_image",
    {"QwenImagePipeline", *EDITING},
    graph,
    sizes,
    presets=("qwen-image", "qwen-image-edit", "qwen-image-edit-plus"),
)
