"""A unit is what one decode step gives a sequence: a token id, or a row of codes whose first is the token id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

Unit: TypeAlias = int | list[int]
"""A token id; of a stage model that yields rows of codes (`YieldsRows`), the whole row, code 0 first."""


def ids_of(units: Sequence[Unit]) -> list[int]:
    """The token id of each unit: itself, or code 0 of its row."""
    return [unit if isinstance(unit, int) else unit[0] for unit in units]


def rows_of(units: Sequence[Unit]) -> list[list[int]]:
    """The rows of codes; empty if the units are token ids."""
    return [unit for unit in units if not isinstance(unit, int)]


class TurnEnd(msgspec.Struct, frozen=True):
    """Where and how a turn of a request with open input ended. The sequence then holds for more input."""

    units: int
    """Number of units of the output up to the end of this turn, including those of earlier turns."""
    finish_reason: str
    stop_reason: int | str | None = None
