"""Read typed values from a mapping of a file: every error names the key's path, the value and the remedy.

Optional reading: reads a section of a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

from segue.messages.errors import ConfigError, nearest

T = TypeVar("T")

_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMGT]I?)?B)\s*", re.IGNORECASE)


def size_of(text: str) -> int | None:
    """Convert a number with a unit to bytes (`MiB`: 2^20, `GB`: 10^9); None for other text."""
    match = _SIZE.fullmatch(text)
    return int(float(match[1]) * _UNITS[match[2].upper()]) if match else None


def wrong(path: str, value: object, right: str) -> ConfigError:
    """Return the `ConfigError` for a wrong value, to be raised."""
    return ConfigError(f"{path} is {value!r}; it must be {right}", field=path)


class Section:
    """The mapping at `path` of a file; keys that it lacks are looked up in the section `below`.

    A key set to null is not looked up below: it takes the default given to the reading method.
    """

    def __init__(
        self,
        path: str,
        values: object,
        keys: Collection[str],
        *,
        below: Section | None = None,
        foreign: Mapping[str, str] | None = None,
        own: Collection[str] = (),
    ) -> None:
        """`keys`: the allowed keys; `foreign`: another program's key → our key, for the error message; `own`: keys that
        are not looked up below."""
        self.path = path
        self.values = as_mapping(path, values)
        self.below = below
        self.own = own
        for key in self.values:
            if key not in keys:
                instead = f"; write {foreign[key]} instead" if foreign and key in foreign else nearest(key, keys)
                where = f"{path} has" if path else "the deployment has"
                raise ConfigError(f"{where} no key {key!r}{instead}", field=self.at(key))

    def at(self, key: str) -> str:
        """Return the path of a key of this section."""
        return f"{self.path}.{key}" if self.path else key

    def find(self, key: str) -> tuple[str, Any]:
        """Return (path, value) of a key, here or below; the value is None if it is null or missing."""
        if key in self.values or key in self.own or self.below is None:
            return self.at(key), self.values.get(key)
        return self.below.find(key)

    def says(self, key: str) -> bool:
        """Whether the key is set, here or below, even to null."""
        return key in self.values or (self.below is not None and key not in self.own and self.below.says(key))

    def integer(self, key: str, default: T, *, least: int = 1, most: int | None = None) -> int | T:
        path, value = self.find(key)
        if value is None:
            return default
        if type(value) is not int or value < least or (most is not None and value > most):
            raise wrong(path, value, f"an integer of at least {least}" + (f" and at most {most}" if most else ""))
        return value

    def number(self, key: str, default: T, *, most: float = math.inf) -> float | T:
        """Return a finite number above 0, up to `most`."""
        path, value = self.find(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not (0 < value <= most and math.isfinite(value)):
            raise wrong(path, value, "a number above 0" + ("" if math.isinf(most) else f" and at most {most:g}"))
        return float(value)

    def size(self, key: str, default: T, *, least: int = 1) -> int | T:
        """Return bytes from an integer, or from text with a unit (`MiB`: 2^20, `GB`: 10^9)."""
        path, value = self.find(key)
        if value is None:
            return default
        size = size_of(value) if isinstance(value, str) else value
        if type(size) is not int or size < least:
            raise wrong(path, value, f"a size of at least {least} bytes, such as 1048576, '64MiB' or '1GB'")
        return size

    def flag(self, key: str, default: bool) -> bool:
        path, value = self.find(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(path, value, "true or false")
        return value

    def choice(self, key: str, default: str, allowed: Collection[str]) -> str:
        path, value = self.find(key)
        if value is None:
            return default
        if value not in allowed:
            raise wrong(path, value, f"one of {', '.join(allowed)}{nearest(str(value), allowed)}")
        return str(value)

    def choices(self, key: str, default: T, allowed: Collection[str]) -> tuple[str, ...] | T:
        """Return one or several of the allowed values, each at most once, from one or a list."""
        path, value = self.find(key)
        if value is None:
            return default
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise wrong(path, value, f"one of {', '.join(allowed)}, or a list of them, each once")
        for name in names:
            if name not in allowed:
                raise wrong(path, value, f"of {', '.join(allowed)}{nearest(name, allowed)}")
        return tuple(names)

    def mapping(self, key: str) -> dict[str, Any]:
        path, value = self.find(key)
        return as_mapping(path, value)

    def entries(self, key: str) -> Iterator[tuple[str, Any]]:
        """Yield (path, entry) of a list."""
        path, value = self.find(key)
        if value is not None and not isinstance(value, list):
            raise wrong(path, value, "a list")
        for number, entry in enumerate(value or []):
            yield f"{path}[{number}]", entry


def as_mapping(path: str, value: object) -> dict[str, Any]:
    """Return the value as a mapping with text keys; null gives an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(path or "the deployment", value, "a mapping")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{path or 'the deployment'} has the key {key!r}; keys must be text", field=path)
    return dict(value)
