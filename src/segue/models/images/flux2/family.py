"""Registers Flux 2. No torch here."""

from __future__ import annotations

from segue.models.images.flux2.graph import graph, sizes
from segue.models.shared.diffusion.family import pipeline_family

FAMILY = pipeline_family(
    "flux2",
    {"Flux2Pipeline", "Flux2KleinPipeline"},
    graph,
    sizes,
    presets=("flux2", "flux2-klein", "flux2-klein-distilled"),
)
