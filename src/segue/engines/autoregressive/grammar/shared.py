"""Grammars of a stage on several ranks: rank 0 alone compiles and follows them, and the others have its answers.

A compiled grammar is large and takes long to make, and what it says is a few bytes. So every call of a `Form` that
returns something is one message from rank 0; all ranks make the same calls.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from segue.engines.autoregressive.grammar.grammar import Compilation, Form, Grammars
from segue.engines.contract import StageRequest
from segue.parallel.ranks import Ranks


class SharedGrammars:
    """`Grammars` on several ranks."""

    def __init__(self, inner: Grammars, ranks: Ranks) -> None:
        """`inner`: used on rank 0 only."""
        self._inner = inner
        self._ranks = ranks

    def ask(self, request: StageRequest) -> Compilation | None:
        """Like `Grammars.ask`. On other ranks than rank 0 nothing is compiled: its engine settles the compilation."""
        if self._ranks.first:
            return self._inner.ask(request)
        return None if request.sampling.structured_outputs is None else Compilation("", "")

    def grammar(self, compilation: Compilation, stop_token_ids: Collection[int]) -> SharedGrammar:
        """Like `Grammars.grammar`."""
        inner = self._inner.grammar(compilation, stop_token_ids) if self._ranks.first else None
        return SharedGrammar(inner, self._ranks)


class SharedGrammar:
    """A `Form` on several ranks."""

    def __init__(self, inner: Form | None, ranks: Ranks) -> None:
        """`inner`: None on all ranks but rank 0."""
        self._inner = inner
        self._ranks = ranks

    def mask(self, bitmask: torch.Tensor, row: int) -> None:
        """Like `Grammar.mask`."""

        def words() -> bytes:
            self._own.mask(bitmask, row)
            return bitmask[row].numpy().tobytes()

        given = self._ranks.same(words, bytes)
        bitmask[row] = torch.frombuffer(bytearray(given), dtype=bitmask.dtype)

    def accept(self, token: int) -> bool:
        """Like `Grammar.accept`."""
        return self._ranks.same(lambda: self._own.accept(token), bool)

    def rollback(self, tokens: int) -> None:
        """Like `Grammar.rollback`."""
        if self._inner is not None:
            self._inner.rollback(tokens)

    def fork(self) -> SharedGrammar:
        """Like `Grammar.fork`."""
        return SharedGrammar(None if self._inner is None else self._inner.fork(), self._ranks)

    @property
    def over(self) -> bool:
        """Like `Grammar.over`."""
        return self._ranks.same(lambda: self._own.over, bool)

    @property
    def exhausted(self) -> bool:
        """Like `Grammar.exhausted`."""
        return self._ranks.same(lambda: self._own.exhausted, bool)

    @property
    def _own(self) -> Form:
        assert self._inner is not None, "rank 0 has the grammar"
        return self._inner
