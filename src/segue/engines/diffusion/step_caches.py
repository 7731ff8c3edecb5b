"""Step caches: predict some network calls from earlier ones. Lossy, so used only for requests that ask for it.

| `step_cache` | predicted | when |
|---|---|---|
| `first_block` | the output of all blocks but the first | if the first adds nearly what it did when all were computed |
| `teacache` | the output of all blocks | while the first block's input has changed little since they were computed |
| `taylorseer` | the prediction | in four steps of five, along the line through the last two that were computed |

Every decision is made row by row, from the history of the sample itself, and is kept with the sample: a request's
result does not depend on the other requests in its calls, and requests without a cache are unaffected.

- `first_block` (First Block Cache of ParaAttention, as diffusers has it) and `teacache` (Liu et al., arXiv 2411.19108)
  need a network made of blocks: the stage model runs such rows (`CachesBlocks`), in separate calls.
- `taylorseer` (Liu et al., "From reusing to forecasting: accelerating diffusion models with TaylorSeers", 2025, eq. 6,
  of the first order and of the whole network: diffusers' `use_lite_mode`) needs no support by the network. A predicted
  row is in no call; a computed one shares its call with any other row.

Optional reading: without a cache `answers` is one call of the network for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from segue.engines.diffusion.contract import CachesBlocks, DiffusionModel, Row, Sample
from segue.messages.diffusion import BLOCK_CACHES, TAYLORSEER

WARM = 3
"""Number of calls computed before any is predicted; diffusers' default, as is `INTERVAL`."""
INTERVAL = 5
"""After those, one call in this many is computed."""

Answer = torch.Tensor | Exception


@dataclass(slots=True)
class _Line:
    """For one branch under one network: the straight line through its last two predictions."""

    calls: int = 0
    """Calls so far, computed or predicted."""
    at: int = 0
    """Number of the last computed call."""
    value: torch.Tensor | None = None
    slope: torch.Tensor | None = None
    """Change per call; None while there is only one prediction."""

    def due(self) -> bool:
        """Whether the next call must be computed."""
        return self.calls < WARM or (self.calls - WARM - 1) % INTERVAL == 0

    def computed(self, prediction: torch.Tensor) -> None:
        if self.value is not None:
            self.slope = (prediction - self.value) / (self.calls - self.at)
        self.value, self.at = prediction, self.calls
        self.calls += 1

    def drafted(self) -> torch.Tensor:
        assert self.value is not None, "a call was predicted before any was computed"
        draft = self.value if self.slope is None else self.value + (self.calls - self.at) * self.slope
        self.calls += 1
        return draft


class StepCaches:
    """Applies the requests' step caches to the engine's calls."""

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model

    def bucket(self, sample: Sample) -> Hashable:
        """Rows of samples with equal buckets may share a call."""
        own = self._model.bucket(sample)
        name = sample.params.step_cache
        return (own, name) if name in BLOCK_CACHES else own

    def rows(self, sample: Sample, branches: Sequence[int]) -> int:
        """How many rows the next step of a sample with these branches adds to a call."""
        if sample.params.step_cache != TAYLORSEER:
            return len(branches)
        return sum(self._line(sample, branch).due() for branch in branches)

    def measures(self, rows: Sequence[Row]) -> bool:
        """Whether the time of a call of these rows reflects its number of rows."""
        return all(row.sample.params.step_cache not in BLOCK_CACHES for row in rows)

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """One call of the network, of rows of equal bucket."""
        if rows[0].sample.params.step_cache not in BLOCK_CACHES:
            return self._model.predict(rows)
        assert isinstance(self._model, CachesBlocks), "the stage model accepted a step cache that it does not support"
        return self._model.predict_behind_first(rows)

    def answers(self, rows: Sequence[Row], compute: Callable[[Sequence[Row]], Sequence[Answer]]) -> list[Answer]:
        """The computed or predicted result for each row. `compute`: runs the network for the rows not predicted."""
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
                answers.append(line.drafted())
                continue
            answer = next(computed)
            if line is not None and isinstance(answer, torch.Tensor):
                line.computed(answer)
            answers.append(answer)
        return answers

    def _line(self, sample: Sample, branch: int) -> _Line:
        """The line of a branch; each expert of a sample has its own."""
        line = sample.step_cache.setdefault((self._model.bucket(sample), branch), _Line())
        assert isinstance(line, _Line)
        return line
