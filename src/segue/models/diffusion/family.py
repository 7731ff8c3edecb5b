"""What the families of diffusers' pipelines have in common, as the registry knows them. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.diffusion.sizes import Sizes
from segue.models.family import Family


def pipeline_family(
    name: str,
    pipelines: Iterable[str],
    graph: Callable[[dict[str, Any]], StageGraph],
    sizes: Callable[[dict[str, Any], Path], Sizes | None],
    presets: tuple[str, ...],
) -> Family:
    """A family in the folder of its name. `pipelines`: classes of `model_index.json`; `sizes`: what a checkpoint makes,
    by that file and the directory; `presets`: of `segue tiny`."""
    return Family(
        name=name,
        architectures=frozenset(pipelines),
        graph=graph,
        sizes=sizes,
        stages_module=f"segue.models.{name}.stages",
        chats=lambda model_dir: False,
        stage_keys=frozenset({"lora"}),
        tiny_module=f"segue.models.{name}.tiny",
        tiny_names=presets,
    )
