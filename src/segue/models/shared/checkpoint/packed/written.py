"""Check entries of a `quantization_config`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from segue.messages.errors import ConfigError

FIELD = "quantization_config"
T = TypeVar("T")


def entry(path: Path, written: dict[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """The value of an entry. Raises `ConfigError` if its type is wrong, or it is missing without a default."""
    value = written.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise ConfigError(f"{path}: {FIELD}.{name} is {value!r}; it must be of type {kind.__name__}", field=FIELD)
    return value


def one_of(path: Path, name: str, value: T, offered: Collection[T]) -> T:
    """Raises `ConfigError` with the file, entry and supported values unless `value` is one of them."""
    if value not in offered:
        raise ConfigError(
            f"{path}: {FIELD}.{name} is {value!r}; supported are {', '.join(map(str, offered))}", field=FIELD
        )
    return value
