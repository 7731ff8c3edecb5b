"""Stable Diffusion 3, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.family import Family
from segue.models.stable_diffusion_3.graph import graph

FAMILY = Family(
    name="stable_diffusion_3",
    architectures=frozenset({"StableDiffusion3Pipeline"}),
    graph=graph,
    stages_module="segue.models.stable_diffusion_3.stages",
    chats=lambda model_dir: False,
    stage_keys=frozenset({"lora"}),
    tiny_module="segue.models.stable_diffusion_3.tiny",
    tiny_names=("sd3", "sd3-without-t5"),
)
