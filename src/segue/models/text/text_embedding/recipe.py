"""Read the files that sentence-transformers adds to a checkpoint: the modules that turn hidden states into a vector. No
torch here.

`modules.json` lists the modules in order: a Transformer, a Pooling over its hidden states, then any number of Dense and
Normalize. (Written by `SentenceTransformer.save`; only the last component of the type names is stable over versions.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError, nearest
from segue.models.shared.checkpoint.files import read_json, read_object

MODULES = "modules.json"
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Key of a pooling's config → mode, in the order in which several are concatenated."""
POOLINGS = tuple(_POOLING_KEYS.values())
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh"}


@dataclass(frozen=True)
class Dense:
    """A linear layer over the vector."""

    directory: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """`identity` or `tanh`."""


@dataclass(frozen=True)
class Recipe:
    """The steps from a model's hidden states to the vector."""

    pooling: tuple[str, ...]
    """Names in `POOLINGS`; the results of several are concatenated."""
    then: tuple[Dense | None, ...]
    """The steps after pooling, in order; None: normalize to length 1."""
    max_length: int | None
    """The checkpoint's limit on a text's tokens."""
    dimensions: frozenset[int] | None
    """Lengths to which a vector may be truncated (Matryoshka: Kusupati et al., 2022); None: any, if `cuttable`."""
    cuttable: bool


def read_recipe(model_dir: Path, config: dict[str, Any]) -> Recipe:
    """Read the recipe. Raises `ConfigError` with the file, key and value of a missing or unsupported entry."""
    path = model_dir / MODULES
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(entry, dict) for entry in modules):
        raise ConfigError(f"{path}: must hold a list of modules", field="model")
    kinds = [str(entry.get("type", "")).rpartition(".")[2] for entry in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise ConfigError(
            f"{path}: lists {', '.join(kinds) or 'nothing'}; a Transformer and a Pooling must come first", field="model"
        )
    if modules[0].get("path"):
        raise ConfigError(
            f"{path}: the Transformer is in {modules[0]['path']!r}; only one next to {MODULES} is served", field="model"
        )
    then = [_step(path, model_dir, kind, entry) for kind, entry in zip(kinds[2:], modules[2:], strict=True)]
    cuts = config.get("matryoshka_dimensions")
    return Recipe(
        pooling=_pooling(model_dir / str(modules[1].get("path")) / "config.json"),
        then=tuple(then),
        max_length=_max_length(model_dir / "sentence_bert_config.json"),
        dimensions=None if cuts is None else frozenset(int(size) for size in cuts),
        cuttable=bool(cuts or config.get("is_matryoshka")),
    )


def _step(path: Path, model_dir: Path, kind: str, entry: dict[str, Any]) -> Dense | None:
    if kind == "Normalize":
        return None
    if kind != "Dense":
        raise ConfigError(f"{path}: module {kind!r} is not served; Dense and Normalize are", field="model")
    directory = model_dir / str(entry.get("path"))
    values = read_object(directory / "config.json")
    activation = str(values.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"{directory / 'config.json'}: activation_function {activation!r} is not served; Identity and Tanh are",
            field="model",
        )
    try:
        return Dense(
            directory,
            int(values["in_features"]),
            int(values["out_features"]),
            bool(values.get("bias", True)),
            _ACTIVATIONS[activation],
        )
    except KeyError as error:
        raise ConfigError(f"{directory / 'config.json'}: has no {error}", field="model") from error


def _pooling(path: Path) -> tuple[str, ...]:
    values = read_object(path)
    named = values.get("pooling_mode")
    if named is None:
        modes = [mode for key, mode in _POOLING_KEYS.items() if values.get(key)]
    else:
        modes = [named] if isinstance(named, str) else list(named)
    if not modes:
        raise ConfigError(f"{path}: names no pooling mode", field="model")
    for mode in modes:
        if mode not in POOLINGS:
            raise ConfigError(f"{path}: pooling mode {mode!r} is not served{nearest(mode, POOLINGS)}", field="model")
    if values.get("include_prompt") is False:
        raise ConfigError(f"{path}: include_prompt is false, which is not served", field="model")
    return tuple(modes)


def _max_length(path: Path) -> int | None:
    if not path.is_file():
        return None
    length = read_object(path).get("max_seq_length")
    return None if length is None else int(length)
