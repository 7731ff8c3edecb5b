"""Stable Diffusion XL, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.diffusion.family import pipeline_family
from segue.models.sdxl.graph import graph, sizes

FAMILY = pipeline_family("sdxl", {"StableDiffusionXLPipeline"}, graph, sizes, presets=("sdxl",))
