"""JSON files of a checkpoint. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """What a file holds that must hold a JSON object. Raises `ConfigError` naming it."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object", field="model")
    return value


def read_json(path: Path) -> Any:
    """What a file holds. Raises `ConfigError` naming it."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", field="model") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}", field="model") from error


def check_objects(directory: Path, names: Iterable[str]) -> None:
    """For what a library could not make sense of: raise `ConfigError` naming the first of these files that is there and
    holds no JSON object."""
    for name in names:
        if name.endswith(".json") and (directory / name).is_file():
            read_object(directory / name)
