"""Objects that installed packages register through entry points.

Optional reading: only for installed families.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from segue.messages.errors import ConfigError

T = TypeVar("T")


def plugins(group: str, kind: type[T]) -> Iterator[T]:
    """Yield the objects of an entry-point group. Raises `ConfigError` with the package's name if one cannot be loaded
    or is no `kind`."""
    for point in entry_points(group=group):
        yield _loaded(point, group, kind)


def _loaded(point: EntryPoint, group: str, kind: type[T]) -> T:
    package = "a package" if point.dist is None else f"the package {point.dist.name!r}"
    where = f"the entry point {point.name} = {point.value!r} ({group}) of {package}"
    try:
        found = point.load()
    except Exception as error:  # importing foreign code may raise anything
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, kind):
        raise ConfigError(f"{where} is {type(found).__name__}; it must be a {kind.__module__}.{kind.__qualname__}")
    return found
