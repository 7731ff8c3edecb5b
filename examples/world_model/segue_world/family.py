"""Describes the model to Segue's registry, without importing torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.family import Family
from segue.models.shared.diffusion.family import denoise
from segue.models.shared.diffusion.sizes import Sizes


def graph(config: dict[str, Any]) -> StageGraph:
    """The stage graph: input → denoiser → decoder."""
    g = StageGraph("world")
    denoise(g, gives="video")
    return g


def sizes(config: dict[str, Any], model_dir: Path) -> Sizes:
    """The allowed sizes: height and width are multiples of 4."""
    return Sizes(multiple=4)


FAMILY = Family(
    name="world",
    architectures=frozenset({"WorldPipeline"}),  # `_class_name` of model_index.json
    graph=graph,
    stages_module="segue_world.stages",
    chats=lambda model_dir: False,
    sizes=sizes,
    options=frozenset({"actions"}),
    tiny_module="segue_world.tiny",
    tiny_names=("world",),
)
