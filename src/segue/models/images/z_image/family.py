"""Registers Z-Image. No torch here."""

from __future__ import annotations

from segue.models.images.z_image.graph import graph, sizes
from segue.models.shared.diffusion.family import pipeline_family

FAMILY = pipeline_family("z_image", {"ZImagePipeline"}, graph, sizes, presets=("z-image",))
