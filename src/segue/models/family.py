"""The interface between a model family and the registry (`segue.models.registry`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from segue.graph.stage_graph import StageGraph
from segue.messages.speech import SpeechFacts, TextToSpeech
from segue.models.shared.dialects.dialect import Dialect, dialect_of
from segue.models.shared.diffusion.sizes import Sizes


class Stages(Protocol):
    """The torch half of a family: its `stages` module, imported by workers only."""

    STAGE_MODELS: dict[str, Callable[..., Any]]
    """By stage name: `LoadContext` → the stage model of the kind that the stage's engine needs."""
    TRANSFERS: dict[tuple[str, str], Callable[..., Any]]
    """By (from, to) stage names: `Transfer`."""


@dataclass(frozen=True)
class TinyPreset:
    """A small checkpoint that `segue tiny` can write."""

    sizes: tuple[str, ...]
    make: Callable[[Path, str, int], None]
    """(directory, size, seed): equal size and seed give equal files."""


@dataclass(frozen=True)
class Family:
    """One model family. Modules that import torch are named by strings, so that the control plane need not import
    them."""

    name: str
    architectures: frozenset[str]
    graph: Callable[[dict[str, Any]], StageGraph]
    """Config of the checkpoint (as JSON) → its stage graph."""
    stages_module: str
    reference_module: str | None = None
    """Module whose `load` runs the library's own model of a checkpoint (`segue.models.shared.reference`), with which
    `segue verify` compares."""
    claims: Callable[[dict[str, Any], Path], bool] = lambda config, model_dir: False
    """Whether this family serves a checkpoint (config, directory) whose architecture no family names; if several do,
    the first registered wins. May raise `ConfigError` with the reason why such a checkpoint cannot be served."""
    chats: Callable[[Path], bool] = lambda model_dir: True
    """Whether a checkpoint accepts messages: a bare string from Python is then a user message, else a prompt."""
    dialect: Callable[[Path, dict[str, Any]], Dialect] = dialect_of
    """Directory and config of a checkpoint → its format of tool calls and reasoning; must not import torch."""
    sizes: Callable[[dict[str, Any], Path], Sizes | None] = lambda config, model_dir: None
    """Config and directory of a checkpoint that generates images or video → its output sizes, as far as its files state
    them; must not import torch."""
    speech: Callable[[dict[str, Any], Path], SpeechFacts] | None = None
    """For a transcription model: config and directory of a checkpoint → how to prompt it; must not import torch."""
    says: Callable[[dict[str, Any], Path], TextToSpeech | None] = lambda config, model_dir: None
    """Config and directory of a checkpoint → how it says a given text, or None if it cannot; must not import torch."""
    options: frozenset[str] = frozenset()
    """Names of request options that the family accepts, e.g. `use_audio_in_video`."""
    appends: bool = False
    """Whether a request may be open: input is appended while it runs (`segue.models.shared.input_stage`)."""
    goes_on: bool = False
    """Whether a request may go on from an earlier one: its input stage makes one prompt of both (`Request.earlier`)."""
    skips_tokenizer: bool = False
    """Whether its stages run without a tokenizer, on token ids (`skip_tokenizer_init`)."""
    open_options: bool = False
    """Only the checkpoint's stages know the options: the server accepts all, also as keys of a request, and the input
    stage checks them."""
    stage_keys: frozenset[str] = frozenset()
    """Keys of autoregressive and diffusion stages that need support of the family, and have it: `lora`,
    `quantization`."""
    tiny_module: str | None = None
    """Module with `PRESETS: dict[str, TinyPreset]`, by the names below."""
    tiny_names: tuple[str, ...] = ()
    """The names of its presets for `segue tiny`."""

    def load_stages(self) -> Stages:
        return cast(Stages, importlib.import_module(self.stages_module))
