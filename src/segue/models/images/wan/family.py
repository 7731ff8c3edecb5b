"""Registers Wan. No torch here."""

from __future__ import annotations

from segue.models.images.wan.graph import graph, sizes
from segue.models.shared.diffusion.family import pipeline_family

FAMILY = pipeline_family("wan", {"WanPipeline", "WanImageToVideoPipeline"}, graph, sizes, presets=("wan",))
