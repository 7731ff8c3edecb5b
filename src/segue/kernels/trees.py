"""Values of one kind within lists, tuples and dictionaries, as functions are given and give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def leaves(value: Any, kind: type[T]) -> Iterator[T]:
    """Those in a value, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part, kind)
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part, kind)


def mapped(value: Any, kind: type[T], made: Callable[[T], Any]) -> Any:
    """The value with others in their place, asked for in the order of `leaves`."""
    if isinstance(value, kind):
        return made(value)
    if isinstance(value, list | tuple):
        return type(value)([mapped(part, kind, made) for part in value])
    if isinstance(value, dict):
        return {name: mapped(part, kind, made) for name, part in value.items()}
    return value
