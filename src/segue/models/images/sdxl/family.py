"""Registers Stable Diffusion XL. No torch here."""

from __future__ import annotations

from segue.models.images.sdxl.graph import graph, sizes
from segue.models.shared.diffusion.family import pipeline_family

FAMILY = pipeline_family("sdxl", {"StableDiffusionXLPipeline"}, graph, sizes, presets=("sdxl",))
