"""How likely the tokens of beams were, kept by what each beam has generated: beams share their beginnings."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from segue.engines.autoregressive.contract import Vocabulary
from segue.engines.autoregressive.logprobs import Likelihoods, Wanted
from segue.messages.deltas import TokenLogprobs

Ids = tuple[int, ...]


class BeamLogprobs:
    """Of the beams that go on and of those that have ended."""

    def __init__(self, wanted: Wanted, vocabulary: Vocabulary | None) -> None:
        self._wanted = wanted
        self._vocabulary = vocabulary
        self._told: dict[Ids, list[TokenLogprobs]] = {(): []}

    def step(self, logits: torch.Tensor, generated: Seq[Ids], kept: Iterable[Ids]) -> None:
        """`logits` [beams, vocab] float32 of the model itself, one row for all beams after the prompt; `generated`:
        what each beam had so far; `kept`: the beams after this step, and all that have ended. Others are forgotten."""
        rows = {ids: min(row, len(logits) - 1) for row, ids in reversed(list(enumerate(generated)))}
        kept = dict.fromkeys(kept)
        new = [ids for ids in kept if ids not in self._told]
        told = {ids: self._told[ids] for ids in kept if ids in self._told}
        if new:
            places = torch.tensor([rows[ids[:-1]] for ids in new], device=logits.device)
            likely = Likelihoods(logits[places], [self._wanted] * len(new))
            for ids, one in zip(new, likely.of([ids[-1] for ids in new], self._vocabulary), strict=True):
                told[ids] = [*self._told[ids[:-1]], one]
        self._told = told

    def of(self, generated: Ids) -> list[TokenLogprobs]:
        """One for each of these tokens, which a beam has or ended with."""
        return self._told[generated]
