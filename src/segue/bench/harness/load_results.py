"""Base classes of results that grow level by level."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from segue.bench.harness.hardware import Machine
from segue.bench.harness.result_file import VERSION


class GrowingResult(msgspec.Struct, kw_only=True):
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
    def unfinished(self) -> str:
        """A sentence on missing levels; empty if there are none."""
        return f"Unfinished: {self.done} of {self.planned} levels." if self.done < self.planned else ""


class LoadResult(GrowingResult, kw_only=True):
    """The common part of the results of `segue bench text` and `segue bench diffusion`."""

    startup: dict[str, float]
    """Side → seconds from the start of its process until it served."""


ResultT = TypeVar("ResultT", bound=GrowingResult)
Level = Callable[[], Awaitable[None]]
"""Measures one level and stores it in the result."""


async def measure(result: ResultT, levels: Sequence[Level], keep: Callable[[ResultT], None]) -> None:
    """Measure one level after the other. `keep` receives the result after each, so that a stopped run keeps its
    levels."""
    result.planned = len(levels)
    for level in levels:
        await level()
        result.done += 1
        result.finished = datetime.now(UTC).isoformat(timespec="seconds")
        keep(result)
