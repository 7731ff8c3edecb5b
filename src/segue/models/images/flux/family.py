"""Registers Flux. No torch here."""

from __future__ import annotations

from segue.models.images.flux.graph import KONTEXT, graph, sizes
from segue.models.shared.diffusion.family import pipeline_family

FAMILY = pipeline_family(
    "flux",
    {"FluxPipeline", "FluxImg2ImgPipeline", KONTEXT},
    graph,
    sizes,
    presets=("flux", "flux-schnell", "flux-kontext"),
)
