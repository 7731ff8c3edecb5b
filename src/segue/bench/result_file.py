"""The JSON file of a result, whichever benchmark made it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from segue.messages.errors import ConfigError

VERSION = 1
"""Of the layout of every benchmark's file; files of another one are refused."""

ResultT = TypeVar("ResultT", bound=msgspec.Struct)


def write_result(result: msgspec.Struct, path: Path) -> None:
    """The file is whole at every moment: it is written beside its place and put there in one move."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    beside.replace(path)


def read_values(path: Path) -> dict[str, Any]:
    """What the file holds. Raises `ConfigError` for what is no result of this version."""
    try:
        values: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise _unreadable(path, error) from error
    found = values.get("version") if isinstance(values, dict) else None
    if found != VERSION:
        raise ConfigError(f"{path}: version is {found!r}; this program reads {VERSION}", field="version")
    return dict(values)


def result_of(values: dict[str, Any], kind: type[ResultT], path: Path) -> ResultT:
    """The result in what `path` holds. Raises `ConfigError` for that of another benchmark."""
    try:
        return msgspec.convert(values, kind, str_keys=True)  # numbers that are keys are text in JSON
    except msgspec.ValidationError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: no result of a benchmark: {error}", field="results")
