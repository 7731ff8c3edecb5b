"""A form that begins behind a thought."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import numpy as np
import torch

from segue.engines.autoregressive.grammar import Grammar
from segue.engines.autoregressive.thinking import Thinking

_KEPT = 256
"""Places in a thought that can be gone back to: more than drafts are verified at once."""


class AfterThoughts:
    """Where one output is in its thought, and then in its grammar: a `Form`."""

    def __init__(self, grammar: Grammar, place: Thinking, ends: Collection[int]) -> None:
        """`place`: where the output begins. `ends`: tokens that end it, which may not come in a thought."""
        self._grammar = grammar
        self._place = place
        self._ends = sorted(ends)
        self._past: deque[Thinking] = deque(maxlen=_KEPT)
        """The places before, the last of them last."""
        self._behind = 0
        """Tokens that the grammar has accepted."""
        self._bare = False
        """The first of them came in the place of a thought."""

    def mask(self, bitmask: torch.Tensor, row: int) -> None:
        """As `Grammar.mask`; in a thought anything may come that does not end the output."""
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
        """As `Grammar.accept`."""
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
        """As `Grammar.rollback`."""
        behind = min(tokens, self._behind)
        self._grammar.rollback(behind)
        self._behind -= behind
        thought = tokens - behind
        if self._bare and not self._behind:
            thought, self._bare = thought + 1, False
        for _ in range(thought):
            self._place = self._past.pop()

    def fork(self) -> AfterThoughts:
        """Another output at the same place."""
        other = AfterThoughts(self._grammar.fork(), self._place.copy(), self._ends)
        other._past, other._behind, other._bare = self._past.copy(), self._behind, self._bare
        return other

    @property
    def over(self) -> bool:
        """As `Grammar.over`."""
        return self._place.over and self._grammar.over

    @property
    def exhausted(self) -> bool:
        """As `Grammar.exhausted`."""
        return self._place.over and self._grammar.exhausted
