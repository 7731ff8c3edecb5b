"""Step caches: calls of the network that are guessed from earlier ones. A loss, so only for requests that ask for it.

| `step_cache` | what is guessed | when |
|---|---|---|
| `first_block` | what all blocks but the first add | where the first adds nearly what it did when all were computed |
| `teacache` | what all blocks add | while what goes into the first has changed little since they were computed |
| `taylorseer` | the prediction | in four steps of five, along the line through the last two that were computed |

Everything is decided row by row, from what the sample itself has gone through, and kept with the sample: what a request
gets does not depend on who shares its calls, and requests without a cache get what they would get anyway.

- `first_block` (First Block Cache of ParaAttention, as diffusers has it) and `teacache` (Liu et al., arXiv 2411.19108)
  need a network made of blocks: the adapter runs such rows (`CachesBlocks`), in calls of their own.
- `taylorseer` (Liu et al., "From reusing to forecasting: accelerating diffusion models with TaylorSeers", 2025, eq. 6,
  of the first order and of the whole network: diffusers' `use_lite_mode`) needs nothing of the network. A row that is
  guessed is in no call; one that is computed shares it with any other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from segue.engines.diffusion.contract import CachesBlocks, DiffusionAdapter, Row, Sample
from segue.messages.diffusion import BLOCK_CACHES, TAYLORSEER

WARM = 3
"""Calls that are computed before any is guessed; diffusers' default, as the next."""
INTERVAL = 5
"""From then on one of so many is computed."""

Answer = torch.Tensor | Exception


@dataclass(slots=True)
class _Line:
    """Of one branch under one network: the straight line through its last two predictions."""

    calls: int = 0
    """Made so far, computed or guessed."""
    at: int = 0
    """Number of the last that was computed."""
    value: torch.Tensor | None = None
    slope: torch.Tensor | None = None
    """Per call; None where there is one prediction."""

    def due(self) -> bool:
        """The next call is computed."""
        return self.calls < WARM or (self.calls - WARM - 1) % INTERVAL == 0

    def computed(self, prediction: torch.Tensor) -> None:
        if self.value is not None:
            self.slope = (prediction - self.value) / (self.calls - self.at)
        self.value, self.at = prediction, self.calls
        self.calls += 1

    def guessed(self) -> torch.Tensor:
        assert self.value is not None, "the first call is computed"
        guess = self.value if self.slope is None else self.value + (self.calls - self.at) * self.slope
        self.calls += 1
        return guess


class StepCaches:
    """What the engine asks before and in a step."""

    def __init__(self, adapter: DiffusionAdapter) -> None:
        self._adapter = adapter

    def bucket(self, sample: Sample) -> Hashable:
        """What must be equal for rows of samples to share a call."""
        own = self._adapter.bucket(sample)
        name = sample.params.step_cache
        return (own, name) if name in BLOCK_CACHES else own

    def rows(self, sample: Sample, branches: Sequence[int]) -> int:
        """How many rows the next step of a sample of these branches adds to a call."""
        if sample.params.step_cache != TAYLORSEER:
            return len(branches)
        return sum(self._line(sample, branch).due() for branch in branches)

    def measures(self, rows: Sequence[Row]) -> bool:
        """A call of these rows takes as long as its number of rows says."""
        return all(row.sample.params.step_cache not in BLOCK_CACHES for row in rows)

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """One call of the network, of rows of equal bucket."""
        if rows[0].sample.params.step_cache not in BLOCK_CACHES:
            return self._adapter.predict(rows)
        assert isinstance(self._adapter, CachesBlocks), "the adapter refuses what it cannot do"
        return self._adapter.predict_behind_first(rows)

    def answers(self, rows: Sequence[Row], compute: Callable[[Sequence[Row]], Sequence[Answer]]) -> list[Answer]:
        """What the network says to each row, or would; `compute`: calls it, for those that are not guessed."""
        lines = [
            self._line(row.sample, row.branch) if row.sample.params.step_cache == TAYLORSEER else None for row in rows
        ]
        due = [line is None or line.due() for line in lines]
        asked = [row for row, ask in zip(rows, due, strict=True) if ask]
        computed = iter(compute(asked) if asked else [])
        answers: list[Answer] = []
        for line, ask in zip(lines, due, strict=True):
            if not ask:
                assert line is not None
                answers.append(line.guessed())
                continue
            answer = next(computed)
            if line is not None and isinstance(answer, torch.Tensor):
                line.computed(answer)
            answers.append(answer)
        return answers

    def _line(self, sample: Sample, branch: int) -> _Line:
        """Of two experts, each has its own."""
        line = sample.step_cache.setdefault((self._adapter.bucket(sample), branch), _Line())
        assert isinstance(line, _Line)
        return line
