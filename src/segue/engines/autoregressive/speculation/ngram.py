"""Prompt lookup: drafts the tokens that followed the last occurrence of the text's ending (Saxena, 2023; LLMA, Yang et
al., 2023). Good if the reply repeats its prompt or itself: quotations, edits, code, tables. Needs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from segue.engines.autoregressive.speculation.drafter import Computed, Wanted


@dataclass(slots=True)
class _Index:
    """For one sequence: the last occurrence of each n-gram that tokens follow."""

    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram → the index after its last occurrence, never the end of the sequence."""
    known: int = 0
    """N-grams that end before this index are included."""


class NgramDrafter:
    """Copies the tokens after an earlier occurrence of the sequence's longest ending, of `least` to `most` tokens.

    Each new token costs `most - least + 1` entries, so the time for a draft is independent of the sequence's length.
    """

    def __init__(self, least: int, most: int) -> None:
        self._sizes = range(most, least - 1, -1)
        self._indices: dict[str, _Index] = {}

    def rows(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return None

    def observe(self, computed: Sequence[Computed]) -> None:
        """Never called, because `rows` returns None."""

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        return [self._copy(entry) for entry in wanted]

    def _copy(self, wanted: Wanted) -> list[int]:
        ids = wanted.ids
        index = self._indices.setdefault(wanted.key, _Index())
        for end in range(index.known + 1, len(ids)):
            for size in self._sizes:
                if size <= end:
                    index.follows[tuple(ids[end - size : end])] = end
        index.known = max(index.known, len(ids) - 1)
        for size in self._sizes:
            if size <= len(ids) and (place := index.follows.get(tuple(ids[-size:]))) is not None:
                # a copy that reaches the end continues with itself, so a loop is continued
                found = [*ids[place : place + wanted.most]]
                period = len(ids) - place
                while len(found) < wanted.most:
                    found.append(found[-period])
                return found
        return []

    def forget(self, key: str) -> None:
        self._indices.pop(key, None)

    def audit(self) -> None:
        """It has no state that could be inconsistent."""
