"""Qwen-Image, as the registry knows it. No torch here."""

from __future__ import annotations

from segue.models.family import Family
from segue.models.qwen_image.graph import EDITING, graph

FAMILY = Family(
    name="qwen_image",
    architectures=frozenset({"QwenImagePipeline", *EDITING}),
    graph=graph,
    stages_module="segue.models.qwen_image.stages",
    chats=lambda model_dir: False,
    stage_keys=frozenset({"lora"}),
    tiny_module="segue.models.qwen_image.tiny",
    tiny_names=("qwen-image", "qwen-image-edit", "qwen-image-edit-plus"),
)
