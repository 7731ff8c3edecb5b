"""Flux 2, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.diffusion.family import pipeline_family
from segue.models.flux2.graph import graph, sizes

FAMILY = pipeline_family(
    "flux2",
    {"Flux2Pipeline", "Flux2KleinPipeline"},
    graph,
    sizes,
    presets=("flux2", "flux2-klein", "flux2-klein-distilled"),
)
