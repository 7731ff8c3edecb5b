"""Wan, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.family import Family
from segue.models.wan.graph import graph

FAMILY = Family(
    name="wan",
    architectures=frozenset({"WanPipeline", "WanImageToVideoPipeline"}),
    graph=graph,
    stages_module="segue.models.wan.stages",
    chats=lambda model_dir: False,
    stage_keys=frozenset({"lora"}),
    tiny_module="segue.models.wan.tiny",
    tiny_names=("wan",),
)
