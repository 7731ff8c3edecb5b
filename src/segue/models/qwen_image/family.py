"""Qwen-Image, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.diffusion.family import pipeline_family
from segue.models.qwen_image.graph import EDITING, graph, sizes

FAMILY = pipeline_family(
    "qwen_image",
    {"QwenImagePipeline", *EDITING},
    graph,
    sizes,
    presets=("qwen-image", "qwen-image-edit", "qwen-image-edit-plus"),
)
