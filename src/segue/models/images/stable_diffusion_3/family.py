"""Registers Stable Diffusion 3. No torch here."""

from __future__ import annotations

from segue.models.images.stable_diffusion_3.graph import graph, sizes
from segue.models.shared.diffusion.family import pipeline_family

FAMILY = pipeline_family(
    "stable_diffusion_3", {"StableDiffusion3Pipeline"}, graph, sizes, presets=("sd3", "sd3-without-t5")
)
