"""Flux, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.diffusion.family import pipeline_family
from segue.models.flux.graph import KONTEXT, graph, sizes

FAMILY = pipeline_family(
    "flux",
    {"FluxPipeline", "FluxImg2ImgPipeline", KONTEXT},
    graph,
    sizes,
    presets=("flux", "flux-schnell", "flux-kontext"),
)
