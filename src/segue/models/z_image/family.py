"""Z-Image, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.diffusion.family import pipeline_family
from segue.models.z_image.graph import graph, sizes

FAMILY = pipeline_family("z_image", {"ZImagePipeline"}, graph, sizes, presets=("z-image",))
