"""Structured output that begins after a thought."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import numpy as np
import torch

from segue.engines.autoregressive.grammar.grammar import Form
from segue.engines.autoregressive.sample.thinking import Thinking

_KEPT = 256
"""Number of states in a thought to roll back to: more than the drafts verified at once."""


class AfterThoughts:
    """State of one output, first in its thought, then in its grammar: a `Form`."""

    def __init__(self, grammar: Form, place: Thinking, ends: Collection[int]) -> None:
        """`place`: the output's initial thinking state. `ends`: tokens that end it, forbidden within a thought."""
        self._grammar = grammar
        self._place = place
        self._ends = sorted(ends)
        self._past: deque[Thinking] = deque(maxlen=_KEPT)
        """Earlier thinking states, the latest last."""
        self._behind = 0
        """Number of tokens that the grammar has accepted."""
        self._bare = False
        """The first of those came where a thought could have opened."""

    def mask(self, bitmask: torch.Tensor, row: int) -> None:
        """Like `Grammar.mask`; in a thought, all tokens are allowed except those that end the output."""
        opens = self._place.opens
        if self._place.over or opens is not None:
            self._grammar.mask(bitmask, row)
        words = bitmask.numpy().view(np.uint32)[row]
        if opens is not None:
            words[opens >> 5] |= np.uint32(1 << (opens & 31))
        elif not self._place.over:
            words[:] = 0xFFFFFFFF
            for token in self._ends:
                words[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))

    def accept(self, token: int) -> bool:
        """Like `Grammar.accept`."""
        bare = self._place.opens not in (None, token)
        if self._place.over or bare:
            if not self._grammar.accept(token):
                return False
            self._behind += 1
            if not bare:
                return True
            self._bare = True
        self._past.append(self._place)
        self._place = self._place.after([token])
        return True

    def rollback(self, tokens: int) -> None:
        """Like `Grammar.rollback`."""
        behind = min(tokens, self._behind)
        self._grammar.rollback(behind)
        self._behind -= behind
        thought = tokens - behind
        if self._bare and not self._behind:
            thought, self._bare = thought + 1, False
        for _ in range(thought):
            self._place = self._past.pop()

    def fork(self) -> AfterThoughts:
        """An independent copy in the same state."""
        other = AfterThoughts(self._grammar.fork(), self._place.copy(), self._ends)
        other._past, other._behind, other._bare = self._past.copy(), self._behind, self._bare
        return other

    @property
    def over(self) -> bool:
        """Like `Grammar.over`."""
        return self._place.over and self._grammar.over

    @property
    def exhausted(self) -> bool:
        """Like `Grammar.exhausted`."""
        return self._place.over and self._grammar.exhausted
