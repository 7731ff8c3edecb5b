"""Read and write the JSON result files of all benchmarks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from segue.messages.errors import ConfigError

VERSION = 1
"""Version of the file format; files of other versions are refused."""

ResultT = TypeVar("ResultT", bound=msgspec.Struct)


def write_result(result: msgspec.Struct, path: Path) -> None:
    """Write the file atomically: to a temporary name, then rename, so that it is always complete."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    beside.replace(path)


def read_values(path: Path) -> dict[str, Any]:
    """The file's contents. Raises `ConfigError` unless it is a result of this version."""
    try:
        values: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise _unreadable(path, error) from error
    found = values.get("version") if isinstance(values, dict) else None
    if found != VERSION:
        raise ConfigError(f"{path}: version is {found!r}; this program reads {VERSION}", field="version")
    return dict(values)


def result_of(values: dict[str, Any], kind: type[ResultT], path: Path) -> ResultT:
    """The result in the contents of `path`. Raises `ConfigError` for another benchmark's result."""
    try:
        return msgspec.convert(values, kind, str_keys=True)  # JSON has numeric keys as text
    except msgspec.ValidationError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: not a result of a benchmark: {error}", field="results")
