"""Beam search for one request: from the log-probabilities of its beams to the beams of the next step.

The same scoring as `transformers` (`GenerationMixin._beam_search` of 5.23, greedy): the accumulated log-probability
after the token-wise rules; `max(2, 1 + end tokens) * width` candidates a step, of which the first `width` may end, and
the best that do not end go on; an ended one counts with its score over `length ** length_penalty` (Wu et al., 2016, §7,
in that form). All small tensors are on the CPU, float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_NEVER = -1.0e9
"""Score of what must not be chosen, as in `transformers`."""


@dataclass(frozen=True, slots=True)
class End:
    """Why a candidate cannot go on."""

    reason: str
    """`stop` or `length`."""
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished candidate."""

    token_ids: tuple[int, ...]
    logprob: float
    """Accumulated, length penalty not applied."""
    end: End


@dataclass(frozen=True, slots=True)
class Step:
    """How the beams go on: beam i of the next step is beam `parents[i]` of this one with `tokens[i]` after it."""

    parents: list[int]
    tokens: list[int]


class BeamSearch:
    """The scores of running beams, best first, and the best that have ended."""

    def __init__(self, width: int, candidates: int, *, length_penalty: float, early_stopping: bool) -> None:
        """`candidates`: how many continuations are looked at in each step."""
        self.width = width
        self._candidates = candidates
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._length = 0
        self._running = torch.full((width,), _NEVER)
        self._running[0] = 0.0  # all beams are the prompt at first: only one of them counts
        self._scores = torch.full((width,), _NEVER)
        self._ended: list[Ended | None] = [None] * width
        self._improvable = True
        """Sticky, as in `transformers`: once the running beams look too bad, nothing more can end."""

    def step(
        self, log_probs: torch.Tensor, generated: list[list[int]], ends: Callable[[int, int], End | None]
    ) -> Step | None:
        """`log_probs` [width, vocab] float32 of the next token of each beam; `generated`: what each has so far;
        `ends(beam, token)`: whether the beam ends with this token. None: the search is over."""
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
        """The `count` best that have ended, best first; fewer where what is forbidden leaves no more (`transformers`
        then repeats some)."""
        return [ended for ended in self._ended if ended is not None and ended.logprob > _NEVER / 2][:count]

    def _keep_ended(self, scores: torch.Tensor, over: torch.Tensor, candidates: list[Ended | None]) -> None:
        """The best `width` of those that had ended and those that end now, which must be among the first `width`."""
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
        """Whether the best running beam, ending here, would beat one that has ended; and, with early stopping, whether
        fewer than `width` have."""
        possible = self._running[0] / (self._length**self._length_penalty)
        has_ended = torch.tensor([ended is not None for ended in self._ended])
        worst = torch.where(has_ended, self._scores.min(), torch.tensor(_NEVER))
        self._improvable = self._improvable and bool((possible > worst).any())
        return self._improvable and not (self._early_stopping and bool(has_ended.all()))
