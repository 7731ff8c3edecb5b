"""Registers BAGEL with the model registry. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.models.family import Family
from segue.models.omni.bagel.config import read_config
from segue.models.omni.bagel.drawing.settings import OPTIONS, sizes_of
from segue.models.omni.bagel.graph import graph
from segue.models.shared.diffusion.sizes import Sizes

_FILES = ("llm_config.json", "vit_config.json", "ema.safetensors")


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """Whether a checkpoint whose config names no architecture has BAGEL's files, as those that were published first."""
    return not config.get("architectures") and all((model_dir / name).is_file() for name in _FILES)


def sizes(config: dict[str, Any], model_dir: Path) -> Sizes:
    """The sizes that can be drawn. Raises `ConfigError`."""
    return sizes_of(read_config(model_dir))


FAMILY = Family(
    name="bagel",
    architectures=frozenset({"BagelForConditionalGeneration"}),
    claims=claims,
    graph=graph,
    stages_module="segue.models.omni.bagel.stages",
    sizes=sizes,
    goes_on=True,
    options=OPTIONS,
    stage_keys=frozenset({"quantization"}),
    tiny_module="segue.models.omni.bagel.tiny.presets",
    tiny_names=("bagel",),
)
