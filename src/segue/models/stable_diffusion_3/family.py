"""Stable Diffusion 3, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.diffusion.family import pipeline_family
from segue.models.stable_diffusion_3.graph import graph, sizes

FAMILY = pipeline_family(
    "stable_diffusion_3", {"StableDiffusion3Pipeline"}, graph, sizes, presets=("sd3", "sd3-without-t5")
)
