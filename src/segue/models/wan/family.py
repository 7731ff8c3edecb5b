"""Wan, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.diffusion.family import pipeline_family
from segue.models.wan.graph import graph, sizes

FAMILY = pipeline_family("wan", {"WanPipeline", "WanImageToVideoPipeline"}, graph, sizes, presets=("wan",))
