"""Beam search for one request: computes the next beams, and reported log-probabilities, from those of current beams.

The same scoring as `transformers` (`GenerationMixin._beam_search` of 5.23, greedy): the accumulated log-probability
after the token-wise rules; `max(2, 1 + end tokens) * width` candidates per step, of which the first `width` may end,
and the best that do not end continue; an ended one counts with its score over `length ** length_penalty` (Wu et al.,
2016, §7, in that form). All small tensors are on the CPU, float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from segue.engines.autoregressive.contract import Vocabulary
from segue.engines.autoregressive.sample.logprobs import Likelihoods, Wanted
from segue.messages.deltas import TokenLogprobs

Ids = tuple[int, ...]


class BeamLogprobs:
    """Log-probabilities of running and ended beams, keyed by generated tokens, because beams share prefixes."""

    def __init__(self, wanted: Wanted, vocabulary: Vocabulary | None) -> None:
        self._wanted = wanted
        self._vocabulary = vocabulary
        self._entries: dict[Ids, list[TokenLogprobs]] = {(): []}

    def step(self, logits: torch.Tensor, generated: Seq[Ids], kept: Iterable[Ids]) -> None:
        """`logits` [beams, vocab] float32 of the model itself, one row for all beams after the prompt; `generated`: the
        tokens of each beam so far; `kept`: the beams after this step, and all ended ones. Others are dropped."""
        rows = {ids: min(row, len(logits) - 1) for row, ids in reversed(list(enumerate(generated)))}
        kept = dict.fromkeys(kept)
        new = [ids for ids in kept if ids not in self._entries]
        entries = {ids: self._entries[ids] for ids in kept if ids in self._entries}
        if new:
            places = torch.tensor([rows[ids[:-1]] for ids in new], device=logits.device)
            likely = Likelihoods(logits[places], [self._wanted] * len(new))
            for ids, one in zip(new, likely.of([ids[-1] for ids in new], self._vocabulary), strict=True):
                entries[ids] = [*self._entries[ids[:-1]], one]
        self._entries = entries

    def of(self, generated: Ids) -> list[TokenLogprobs]:
        """One entry for each of these tokens, which are those of a running or ended beam."""
        return self._entries[generated]


_NEVER = -1.0e9
"""Score of candidates that must not be chosen, as in `transformers`."""


@dataclass(frozen=True, slots=True)
class End:
    """Why a candidate ends."""

    reason: str
    """`stop` or `length`."""
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished candidate."""

    token_ids: tuple[int, ...]
    logprob: float
    """Accumulated, without length penalty."""
    end: End


@dataclass(frozen=True, slots=True)
class Step:
    """The next beams: beam i is the current beam `parents[i]` followed by `tokens[i]`."""

    parents: list[int]
    tokens: list[int]


class BeamSearch:
    """The scores of running beams, best first, and the best that have ended."""

    def __init__(self, width: int, candidates: int, *, length_penalty: float, early_stopping: bool) -> None:
        """`candidates`: number of continuations considered in each step."""
        self.width = width
        self._candidates = candidates
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._length = 0
        self._running = torch.full((width,), _NEVER)
        self._running[0] = 0.0  # all beams equal the prompt at first: only one of them counts
        self._scores = torch.full((width,), _NEVER)
        self._ended: list[Ended | None] = [None] * width
        self._improvable = True
        """Sticky, as in `transformers`: once the running beams look too bad, no further beam can end."""

    def step(
        self, log_probs: torch.Tensor, generated: list[list[int]], ends: Callable[[int, int], End | None]
    ) -> Step | None:
        """`log_probs` [width, vocab] float32 of the next token of each beam; `generated`: the tokens of each so far;
        `ends(beam, token)`: why the beam ends with this token, or None. Returns None when the search is over."""
        width, vocab = log_probs.shape
        total = log_probs + self._running.to(log_probs.device)[:, None]
        found = torch.topk(total.flatten(), min(self._candidates, total.numel()))
        scores, flat = found.values.cpu(), found.indices.tolist()
        beams, tokens = [place // vocab for place in flat], [place % vocab for place in flat]
        why = [ends(beam, token) for beam, token in zip(beams, tokens, strict=True)]
        over = torch.tensor([end is not None for end in why])
        self._length += 1
        candidates = [
            None if end is None else Ended((*generated[beam], token), score, end)
            for beam, token, score, end in zip(beams, tokens, scores.tolist(), why, strict=True)
        ]
        self._keep_ended(scores, over, candidates)
        going = scores + over.float() * _NEVER
        best = torch.topk(going, width).indices
        self._running = going[best]
        if bool(over.all()) or not self._can_improve():
            return None
        return Step([beams[place] for place in best.tolist()], [tokens[place] for place in best.tolist()])

    def best(self, count: int) -> list[Ended]:
        """The `count` best ended beams, best first; fewer if constraints leave no more (`transformers` then repeats
        some)."""
        return [ended for ended in self._ended if ended is not None and ended.logprob > _NEVER / 2][:count]

    def _keep_ended(self, scores: torch.Tensor, over: torch.Tensor, candidates: list[Ended | None]) -> None:
        """Keep the best `width` of earlier ended beams and those that end now among the first `width` candidates."""
        just = over & (torch.arange(len(over)) < self.width)
        final = scores / (self._length**self._length_penalty)
        full = self._early_stopping and all(ended is not None for ended in self._ended)
        final = final + float(full) * _NEVER + float(not self._improvable) * _NEVER + (~just).float() * _NEVER
        merged = torch.cat((self._scores, final))
        known = [*self._ended, *(one if is_just else None for one, is_just in zip(candidates, just, strict=True))]
        order = torch.topk(merged, self.width).indices
        self._scores = merged[order]
        self._ended = [known[place] for place in order.tolist()]

    def _can_improve(self) -> bool:
        """Whether the best running beam, ending now, would beat an ended one; and, with early stopping, whether fewer
        than `width` have ended."""
        possible = self._running[0] / (self._length**self._length_penalty)
        has_ended = torch.tensor([ended is not None for ended in self._ended])
        worst = torch.where(has_ended, self._scores.min(), torch.tensor(_NEVER))
        self._improvable = self._improvable and bool((possible > worst).any())
        return self._improvable and not (self._early_stopping and bool(has_ended.all()))
