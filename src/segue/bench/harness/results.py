"""Results of benchmarks: JSON files that grow level by level."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from segue.bench.harness.hardware import Machine
from segue.messages.errors import ConfigError

VERSION = 1
"""Version of the file format; files of other versions are refused."""


class Growing(msgspec.Struct, kw_only=True):
    """An unfinished result: it contains the levels counted in `done`."""

    version: int = VERSION
    finished: str = ""
    """Time when its last level finished; ISO 8601, UTC."""
    done: int = 0
    """Number of levels (loads, crowds, intrusions) measured. 0 in older files of `segue bench omni`."""
    planned: int = 0
    """Number of levels planned: more than `done` if the run continues, or was stopped."""
    machine: Machine

    @property
    def unfinished(self) -> list[str]:
        """A sentence on missing levels, if there are any."""
        return [f"Unfinished: {self.done} of {self.planned} levels."] if self.done < self.planned else []


class LoadResult(Growing, kw_only=True):
    """The common part of the results of `segue bench text` and `segue bench diffusion`."""

    startup: dict[str, float]
    """Side → seconds from the start of its process until it served."""


GrowingT = TypeVar("GrowingT", bound=Growing)
ResultT = TypeVar("ResultT", bound=msgspec.Struct)
Level = Callable[[], Awaitable[None]]
"""Measures one level and stores it in the result."""


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


async def measure(result: GrowingT, levels: Sequence[Level], keep: Callable[[GrowingT], None]) -> GrowingT:
    """Measure one level after the other. `keep` receives the result after each, so that a stopped run keeps its
    levels. Returns the result."""
    result.planned = len(levels)
    for level in levels:
        await level()
        result.done += 1
        result.finished = now()
        keep(result)
    return result


def write_result(result: msgspec.Struct, path: Path) -> None:
    """Write the file atomically: to a temporary name, then rename, so that it is always complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    temporary.replace(path)


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
