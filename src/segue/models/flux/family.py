"""Flux, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.family import Family
from segue.models.flux.graph import graph

FAMILY = Family(
    name="flux",
    architectures=frozenset({"FluxPipeline", "FluxImg2ImgPipeline", "FluxKontextPipeline"}),
    graph=graph,
    stages_module="segue.models.flux.stages",
    chats=lambda model_dir: False,
    stage_keys=frozenset({"lora"}),
    tiny_module="segue.models.flux.tiny",
    tiny_names=("flux", "flux-schnell", "flux-kontext"),
)
