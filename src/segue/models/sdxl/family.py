"""Stable Diffusion XL, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.family import Family
from segue.models.sdxl.graph import graph

FAMILY = Family(
    name="sdxl",
    architectures=frozenset({"StableDiffusionXLPipeline"}),
    graph=graph,
    stages_module="segue.models.sdxl.stages",
    chats=lambda model_dir: False,
    stage_keys=frozenset({"lora"}),
    tiny_module="segue.models.sdxl.tiny",
    tiny_names=("sdxl",),
)
