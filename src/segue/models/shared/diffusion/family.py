"""The parts of the registry entry and of the stage graph that all diffusers families share. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from segue.graph.stage_graph import BUILT_IN, INPUT, StageGraph
from segue.models.family import Family
from segue.models.shared.diffusion.sizes import Sizes


def denoise(g: StageGraph, gives: str) -> None:
    """Add the last two stages: the denoiser, fed by the input stage (size, steps, guidance) and every stage declared so
    far, and the decoder that outputs to the client."""
    encoders = [name for name in g.stages if name not in BUILT_IN]
    g.stage("denoiser", "diffusion")
    g.stage("decoder", "module", gives={gives})
    for name in (INPUT, *encoders):
        g.edge(name, "denoiser")
    g.edge("denoiser", "decoder")  # a chunk per image or clip, and per preview


def pipeline_family(
    name: str,
    pipelines: Iterable[str],
    graph: Callable[[dict[str, Any]], StageGraph],
    sizes: Callable[[dict[str, Any], Path], Sizes | None],
    presets: tuple[str, ...],
) -> Family:
    """The registry entry of the family in the folder `name`. `pipelines`: class names in `model_index.json`; `sizes`:
    output sizes of a checkpoint, from that file and the directory; `presets`: names for `segue tiny`."""
    return Family(
        name=name,
        architectures=frozenset(pipelines),
        graph=graph,
        sizes=sizes,
        stages_module=f"segue.models.images.{name}.stages",
        reference_module="segue.models.shared.diffusion.reference",
        chats=lambda model_dir: False,
        stage_keys=frozenset({"lora"}),
        tiny_module=f"segue.models.images.{name}.tiny",
        tiny_names=presets,
    )
