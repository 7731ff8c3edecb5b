"""What a model family is, to those who find it (`segue.models.registry`) and those who write one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from segue.graph.stage_graph import StageGraph
from segue.messages.speech import SpeechFacts
from segue.models.dialects.dialect import Dialect, dialect_of
from segue.models.diffusion.sizes import Sizes


class Stages(Protocol):
    """The torch half of a family: its `stages` module, imported by workers only."""

    ADAPTERS: dict[str, Callable[..., Any]]
    """By stage name: `LoadContext` → adapter of the kind the stage's engine needs."""
    TRANSFERS: dict[tuple[str, str], Callable[..., Any]]
    """By (from, to) stage names: `Transfer`."""


@dataclass(frozen=True)
class TinyPreset:
    """A small checkpoint that can be made here."""

    sizes: tuple[str, ...]
    make: Callable[[Path, str, int], None]
    """(directory, size, seed): the same files for the same size and seed."""


@dataclass(frozen=True)
class Family:
    """One model family. The strings name modules that import torch, so that the control plane need not."""

    name: str
    architectures: frozenset[str]
    graph: Callable[[dict[str, Any]], StageGraph]
    """Config of the checkpoint (as JSON) → its stage graph."""
    stages_module: str
    claims: Callable[[dict[str, Any], Path], bool] = lambda config, model_dir: False
    """Whether this family serves a checkpoint (config, directory) that no family names; of several that do, the first
    known gets it. May raise `ConfigError` with the reason why such a checkpoint cannot be served."""
    chats: Callable[[Path], bool] = lambda model_dir: True
    """Whether a checkpoint takes messages: a bare string from Python is a user message then, else a prompt."""
    voices: Callable[[Path], list[str]] = lambda model_dir: []
    """The voices a checkpoint speaks with, the default first; must not import torch."""
    dialect: Callable[[Path, dict[str, Any]], Dialect] = dialect_of
    """Directory and config of a checkpoint → how its model writes tool calls and thoughts; must not import torch."""
    sizes: Callable[[dict[str, Any], Path], Sizes | None] = lambda config, model_dir: None
    """Config and directory of a checkpoint that makes pictures or video → which sizes it can make, as far as files say
    so; must not import torch."""
    speech: Callable[[dict[str, Any], Path], SpeechFacts] | None = None
    """Of a model that writes down what it hears, config and directory of a checkpoint → how it is asked; must not
    import torch."""
    options: frozenset[str] = frozenset()
    """Names of request options the family understands, e.g. `use_audio_in_video`."""
    open_options: bool = False
    """Only the checkpoint's stages know which options there are: all are taken at the door, also as keys of a request,
    and judged by the input stage."""
    stage_keys: frozenset[str] = frozenset()
    """Keys of autoregressive and diffusion stages that need the family's help, and have it: `lora`, `quantization`."""
    tiny_module: str | None = None
    """Module with `PRESETS: dict[str, TinyPreset]`, by the names below."""
    tiny_names: tuple[str, ...] = ()
    """The names `segue tiny` knows its presets by."""

    def load_stages(self) -> Stages:
        return cast(Stages, importlib.import_module(self.stages_module))
