"""From a drafter's logits to its guesses: drawn as the target will draw, with the same numbers.

The target draws generated token i by looking up a number that depends only on the seed and i. A drafter that looks up
the same number in its own distribution guesses the same token wherever the two distributions put it in the same place:
always where they are equal, at any temperature, where a most-likely-token drafter would be right with the probability
of that token only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segue.engines.autoregressive.penalties import apply_rules
from segue.engines.autoregressive.sampler import choose
from segue.engines.autoregressive.speculation.drafter import Wanted


def guesses(logits: torch.Tensor, wanted: Sequence[Wanted], drafts: Sequence[Sequence[int]]) -> list[int]:
    """[rows, vocab] float32, which may be changed → a token per row; row r comes after `drafts[r]` of `wanted[r]`."""
    samplers = [entry.sampler.after(known) for entry, known in zip(wanted, drafts, strict=True)]
    generated = [entry.generated + len(known) for entry, known in zip(wanted, drafts, strict=True)]
    apply_rules(logits, [sampler.rules for sampler in samplers], generated)
    # a row of NaN, or one whose few tokens are all forbidden, must not spoil the others: it guesses anything
    logits[~logits.amax(dim=-1).isfinite()] = 0.0
    return choose(logits, samplers, generated).tolist()
