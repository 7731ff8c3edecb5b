"""Z-Image, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.family import Family
from segue.models.z_image.graph import graph

FAMILY = Family(
    name="z_image",
    architectures=frozenset({"ZImagePipeline"}),
    graph=graph,
    stages_module="segue.models.z_image.stages",
    chats=lambda model_dir: False,
    stage_keys=frozenset({"lora"}),
    tiny_module="segue.models.z_image.tiny",
    tiny_names=("z-image",),
)
