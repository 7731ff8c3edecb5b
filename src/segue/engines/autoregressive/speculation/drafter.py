"""The protocol of drafters, the acceptance of drafts, and the sampling of drafts. Drafts never change the output.

The sampler's draw for generated token i depends only on the logits, the request's seed and i. So at each draft position
the target draws its own token, with the random number that plain sampling would use there, and a draft is accepted if
it equals that token. The first draw that differs from its draft is the token of that position, and if all drafts are
accepted the next draw is an additional token. So the output is not only distributed as without drafts: it is identical
token for token, in greedy and in seeded sampling, whatever the drafter proposes (up to rounding of logits that are
computed in one batch).

This accepts as many drafts as rejection sampling. The rejection sampler of Leviathan et al. (2023, §2.3) accepts a
draft x with probability min(1, p(x) / q(x)); for a drafter that names one token, q(x) = 1, this is p(x): the
probability that the target draws x.

`draft_ids` samples drafts as the target will, with the same numbers: the target looks up a number that depends only on
the seed and i, and a drafter that looks up the same number in its own distribution drafts the same token wherever the
two distributions map it to the same token. If they are equal, that is always so, at any temperature, while a
most-likely-token drafter would be right only with the probability of that token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from segue.engines.autoregressive.sample.penalties import apply_rules
from segue.engines.autoregressive.sample.sampler import RowSampler, choose


def accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Number of accepted drafts, given `drawn[j]`, the target's draw after drafts[:j].

    The new tokens are then `drawn[: accepted + 1]`: `drawn` is one longer than `drafts`.
    """
    for count, (draft, token) in enumerate(zip(drafts, drawn[:-1], strict=True)):
        if draft != token:
            return count
    return len(drafts)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence that can verify drafts in the next step."""

    key: str
    ids: Sequence[int]
    """Prompt and output so far, all accepted; the engine's own list, which is read-only here."""
    most: int
    """Most drafts; further ones are dropped."""
    generated: int
    """Number of generated tokens in `ids`."""
    sampler: RowSampler
    """The request's sampler, with which a drafter that has a distribution can predict the target's draw."""
    plain: bool = True
    """Whether ids represent the prompt; False if it has its own embeddings (media)."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Tokens that a step computed for a sequence that may speculate, without rejected drafts."""

    key: str
    ids: Sequence[int]
    """Prompt and output so far, including the tokens of this step."""
    start: int
    """Index in the sequence of the first computed token."""
    rows: torch.Tensor
    """[n, width]: the rows that `Drafter.rows` selected, for tokens [start, start + n)."""
    positions: torch.Tensor
    """[n] long: their rotary positions (the first axis)."""


class Drafter(Protocol):
    """Drafts tokens for many sequences at once. Single-threaded; an exception ends speculation, never a request."""

    def rows(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[tokens, hidden] final hidden states of the last step → rows [tokens, width] to pass to `observe`; None:
        `observe` is not called."""

    def observe(self, computed: Sequence[Computed]) -> None:
        """Called after each step. A sequence may restart at an earlier index (preempted), or at a later one than
        expected (found in the prefix cache: those rows were never computed)."""

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Draft tokens for each sequence, in order; may be empty."""

    def forget(self, key: str) -> None:
        """The sequence was removed. Unknown keys are ignored."""

    def audit(self) -> None:
        """Check its own state; an `AssertionError` says what is inconsistent."""


def draft_ids(logits: torch.Tensor, wanted: Sequence[Wanted], drafts: Sequence[Sequence[int]]) -> list[int]:
    """[rows, vocab] float32 (may be modified) → a token per row; row r follows `drafts[r]` of `wanted[r]`."""
    samplers = [entry.sampler.after(known) for entry, known in zip(wanted, drafts, strict=True)]
    generated = [entry.generated + len(known) for entry, known in zip(wanted, drafts, strict=True)]
    apply_rules(logits, [sampler.rules for sampler in samplers], generated)
    # a row of NaN, or one whose tokens are all forbidden, must not spoil the others: it drafts any token
    logits[~logits.amax(dim=-1).isfinite()] = 0.0
    return choose(logits, samplers, generated).tolist()
