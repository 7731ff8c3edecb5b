"""Locate a checkpoint and read and check its JSON files. No torch here.

A checkpoint is a directory, or a name on Hugging Face's hub whose files are in the local cache; nothing is downloaded.
Lengths and sampling values that no engine could use are refused before loading.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from segue.graph.kinds.registry import kind_of
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""OWNER/MODEL."""
_CACHED = "models--"
"""Prefix of folder names in the cache, followed by OWNER--MODEL."""


def located(model: str | Path) -> tuple[Path, str]:
    """(directory, default model name for clients): for a directory its last path component as written, for a cached
    model OWNER/MODEL. Raises `ConfigError`."""
    written = Path(model).expanduser()
    path = Path(os.path.abspath(written))  # keep the name of a symbolic link
    if path.is_dir():
        if path.name.startswith(_CACHED) and (path / "snapshots").is_dir():
            name = _name_of(path)
            return _cached(name, path.parent), name
        cached = path.parent.name == "snapshots" and path.parents[1].name.startswith(_CACHED)
        return path.resolve(), _name_of(path.parents[1]) if cached else path.name
    if path.exists():
        raise ConfigError(f"{str(model)!r} is a file; a checkpoint is a directory", field="model")
    if _NAME.fullmatch(str(model)):
        return _cached(str(model), None), str(model)
    raise ConfigError(f"no checkpoint at {str(model)!r}: that is not a directory", field="model")


def _name_of(folder: Path) -> str:
    return folder.name.removeprefix(_CACHED).replace("--", "/", 1)


def _cached(name: str, cache: Path | None) -> Path:
    """The files of a model in the cache. `cache`: None for the default of the hub's own programs (`HF_HUB_CACHE`,
    `HF_HOME`)."""
    from huggingface_hub import constants, snapshot_download  # a slow import that few calls need
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        partly = getattr(error, "snapshot_path", None)
        if partly is not None:  # a missing file may be unused; otherwise reading it raises an error with its name
            return Path(partly)
        raise ConfigError(
            f"no checkpoint at {name!r}: that is not a directory, and Hugging Face's hub cache has no such model "
            f"({cache or constants.HF_HUB_CACHE}); 'hf download {name}' would download it",
            field="model",
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ConfigError` with the file's name."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object", field="model")
    return value


def read_json(path: Path) -> Any:
    """The JSON value in a file. Raises `ConfigError` with the file's name."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", field="model") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}", field="model") from error


def check_objects(directory: Path, names: Iterable[str]) -> None:
    """Raise `ConfigError` with the first of these files that exists but holds no JSON object. Used to explain a
    library's error."""
    for name in names:
        if name.endswith(".json") and (directory / name).is_file():
            read_object(directory / name)


GENERATION = "generation_config.json"
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Config keys for the maximum number of tokens of a sequence."""

# name → (lowest, highest, lowest is allowed, description of valid values)
_BOUNDS: dict[str, tuple[float, float, bool, str]] = {
    "temperature": (0.0, math.inf, True, "a number from 0"),
    "top_p": (0.0, 1.0, True, "a number from 0 to 1"),
    "min_p": (0.0, 1.0, True, "a number from 0 to 1"),
    "repetition_penalty": (0.0, math.inf, False, "a number above 0"),
}
_WHOLE: dict[str, tuple[int, str]] = {
    "top_k": (-1, "an integer, -1 or 0 for all tokens"),
    "max_new_tokens": (1, "an integer from 1"),
}


def check_files(model_dir: Path, config: Mapping[str, Any], graph: StageGraph) -> None:
    """Check the lengths and sampling settings in the files of a checkpoint that generates tokens. `config`: its
    `config.json`.

    Raises `ConfigError` with the file, field, value and valid values. The worker, which reads the files through the
    library, raises the same errors for values that only the library checks.
    """
    if not any(kind_of(stage.engine).samples for stage in graph.stages.values()):
        return
    path = model_dir / "config.json"
    for names, values in _decoders(config, ()):
        for name in LENGTHS:
            check_positions(values.get(name), ".".join((*names, name)), path)
    path = model_dir / GENERATION
    if path.is_file():
        check_generation(read_object(path), path, None)


def _decoders(values: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """A config and, at any depth, its sub-configs with a vocabulary; each with the keys that lead to it."""
    if not names or "vocab_size" in values:
        yield names, values
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _decoders(value, (*names, name))


def check_positions(value: object, name: str, path: Path | str) -> None:
    """Check the maximum number of tokens of a sequence if it is a number; the library's config checks the type."""
    if isinstance(value, int) and value < 2:
        raise ConfigError(
            f"{path}: {name} is {value}; it must be the number of tokens that a sequence may have, at least 2",
            field="model",
        )


def check_generation(values: Mapping[str, Any], path: Path, vocab: object) -> None:
    """Check sampling settings and end tokens of a generation config (`values`, read from `path`): the library accepts
    anything. `vocab`: the number of token ids, if it is a number."""
    for name, value, right in _wrong(values, vocab):
        raise ConfigError(f"{path}: {name} is {value!r}; it must be {right}", field="model")


def _wrong(values: Mapping[str, Any], vocab: object) -> Iterator[tuple[str, Any, str]]:
    """(name, value, description of valid values) of each invalid setting."""
    sampled = values.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        yield "do_sample", sampled, "true or false"
    for name, (low, high, touches, right) in _BOUNDS.items():
        value = values.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (number and low <= value <= high and (touches or value != low)):
            yield name, value, right
    for name, (least, right) in _WHOLE.items():
        value = values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            yield name, value, right
    for name in ("eos_token_id", "suppress_tokens"):
        value = values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
            yield name, value, "a token id, or a list of them"
        elif name == "suppress_tokens" and isinstance(vocab, int) and any(not 0 <= one < vocab for one in ids):
            yield name, value, f"a list of token ids, which are from 0 to {vocab - 1}"
