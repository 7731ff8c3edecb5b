"""What results that grow level by level have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from segue.bench.hardware import Machine
from segue.bench.result_file import VERSION


class GrowingResult(msgspec.Struct, kw_only=True):
    """A result so far: what is in it is measured, and counted in `done`."""

    version: int = VERSION
    finished: str = ""
    """When the last of its levels was done; ISO 8601, UTC."""
    done: int = 0
    """Levels measured, that is loads, crowds, intrusions. 0 in older files of `segue bench omni`."""
    planned: int = 0
    """Levels that the run was to measure: more than `done` where it goes on, or was stopped."""
    machine: Machine

    @property
    def unfinished(self) -> str:
        """A sentence on what is missing; empty where nothing is."""
        return f"Unfinished: {self.done} of {self.planned} levels." if self.done < self.planned else ""


class LoadResult(GrowingResult, kw_only=True):
    """Of `segue bench text` and `segue bench diffusion`."""

    startup: dict[str, float]
    """Side → seconds from the start of its process until it served."""


ResultT = TypeVar("ResultT", bound=GrowingResult)
Level = Callable[[], Awaitable[None]]
"""Measures, and puts what it found into the result."""


async def measure(result: ResultT, levels: Sequence[Level], keep: Callable[[ResultT], None]) -> None:
    """One level after the other. `keep` gets the result after each: a run that is stopped leaves what it has."""
    result.planned = len(levels)
    for level in levels:
        await level()
        result.done += 1
        result.finished = datetime.now(UTC).isoformat(timespec="seconds")
        keep(result)
