"""What guesses tokens: one small protocol. Whatever a drafter says, the output stays the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from segue.engines.autoregressive.sampler import RowSampler


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence that could verify drafts in the next step."""

    key: str
    ids: Sequence[int]
    """Prompt and output so far, all of them accepted; the engine's own list, only to be read."""
    most: int
    """Longer proposals are cut."""
    generated: int
    """How many of `ids` were generated."""
    sampler: RowSampler
    """How the request draws: what a drafter with a distribution of its own may use to guess the draw."""
    plain: bool = True
    """The ids say what the prompt is; False where it has embeddings of its own (media)."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step computed of a sequence that may speculate: tokens that stay, rejected drafts are not among them."""

    key: str
    ids: Sequence[int]
    """Prompt and output so far, with the tokens this step gave."""
    start: int
    """Place in the sequence of the first computed token."""
    rows: torch.Tensor
    """[n, width]: what the drafter asked for in `rows`, of tokens [start, start + n)."""
    positions: torch.Tensor
    """[n] long: their rotary positions (the first axis)."""


class Drafter(Protocol):
    """Guesses for many sequences at once. Single-threaded; an exception ends speculation, never a request."""

    def rows(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[tokens, hidden] final hidden states of the step just run → rows [tokens, width] it wants to be told of in
        `observe`; None: it is not told."""

    def observe(self, computed: Sequence[Computed]) -> None:
        """After each step. A sequence may start anew at an earlier place (preempted), or at a later one than expected
        (found in the prefix cache: those rows were never computed)."""

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """For each sequence, guesses at its next tokens, in order; none is an answer too."""

    def forget(self, key: str) -> None:
        """The sequence is gone. Unknown keys are ignored."""

    def audit(self) -> None:
        """Check its own books; an `AssertionError` says what is off."""
