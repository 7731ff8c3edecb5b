"""Entries of a `quantization_config`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from segue.messages.errors import ConfigError

FIELD = "quantization_config"
T = TypeVar("T")


def entry(path: Path, written: dict[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Raises `ConfigError` naming file and entry where it is not of this kind, or missing without a default."""
    value = written.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise ConfigError(f"{path}: {FIELD}.{name} is {value!r}; it must be of type {kind.__name__}", field=FIELD)
    return value


def one_of(path: Path, name: str, value: T, offered: Collection[T]) -> T:
    """Raises `ConfigError` naming file, entry and what is offered."""
    if value not in offered:
        raise ConfigError(
            f"{path}: {FIELD}.{name} is {value!r}; what is read is {', '.join(map(str, offered))}", field=FIELD
        )
    return value
