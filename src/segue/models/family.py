"""What a model family is, to those who find it (`segue.models.registry`) and those who write one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from segue.graph.stage_graph import StageGraph
from segue.models.dialects.dialect import Dialect, dialect_of


class Stages(Protocol):
    """The torch half of a family: its `stages` module, imported by workers only."""

    ADAPTERS: dict[str, Callable[..., Any]]
    """By stage name: `LoadContext` → adapter of the kind the stage's engine needs."""
    TRANSFERS: dict[tuple[str, str], Callable[..., Any]]
    """By (from, to) stage names: `Transfer`."""


@dataclass(frozen=True)
class Family:
    """One model family. The strings name modules that import torch, so that the control plane need not."""

    name: str
    architectures: frozenset[str]
    graph: Callable[[dict[str, Any]], StageGraph]
    """Config of the checkpoint (as JSON) → its stage graph."""
    stages_module: str
    voices: Callable[[Path], list[str]] = lambda model_dir: []
    """The voices a checkpoint speaks with, the default first; must not import torch."""
    dialect: Callable[[Path, dict[str, Any]], Dialect] = dialect_of
    """Directory and config of a checkpoint → how its model writes tool calls and thoughts; must not import torch."""
    options: frozenset[str] = frozenset()
    """Names of request options the family understands, e.g. `use_audio_in_video`."""
    tiny_module: str | None = None
    """Module with `make(directory: Path, size: str, seed: int) -> None`, and the sizes it knows in `SIZES`."""
    tiny_name: str | None = None
    """The name `segue tiny` knows it by."""

    def load_stages(self) -> Stages:
        return cast(Stages, importlib.import_module(self.stages_module))
