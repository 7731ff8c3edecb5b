"""Attention of a step's tokens to what their requests were shown, and not to tokens: cross-attention.

A layer that looks at a picture has keys and values of the picture's rows, which are as many for the first token behind
it as for the last. Nobody masks here: tokens that see the same are one call over exactly that, whichever requests they
belong to; those of requests that were shown nothing get zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention

Seen: TypeAlias = tuple[tuple[bytes, int], ...]
"""What a token sees: (which medium, how many of its rows, from the first on), one after the other."""
KeysValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Of all rows of a medium in one layer: [kv_heads, n, head_dim] and [kv_heads, n, value_dim]."""


@dataclass(frozen=True, slots=True)
class Look:
    """Tokens of a step that see the same."""

    rows: torch.Tensor
    """[n] long: their places in the flat batch."""
    seen: Seen


@dataclass(frozen=True, slots=True)
class CrossStep:
    """The keyword argument `across` of a decoder's forward."""

    layers: frozenset[int]
    """Those that look at media; all others attend to tokens."""
    looks: list[Look]
    """A token is in one of them, or in none."""
    keys_values: Callable[[int, bytes], KeysValues]
    """(layer, medium) → its keys and values."""
    made: Callable[[int, torch.Tensor, torch.Tensor], object] | None = None
    """Takes what a layer made of the media that had none: (layer, keys, values), [kv_heads, rows of all these, dim]
    each. None: a layer hands them to its cache."""

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [heads, tokens, head_dim] → [tokens, heads, value_dim]; zeros for tokens that see nothing."""
        heads, tokens, _ = q.shape
        out: torch.Tensor | None = None
        for look in self.looks:
            keys, values = self._seen(layer, look.seen)
            # query heads that share keys are more queries: nothing is repeated
            queries = q.index_select(1, look.rows).reshape(1, keys.shape[0], -1, q.shape[2])
            mixed = scaled_dot_product_attention(queries, keys[None], values[None], scale=scaling)
            mixed = mixed.view(heads, -1, values.shape[2]).transpose(0, 1)
            if out is None:
                out = mixed.new_zeros(tokens, heads, values.shape[2])
            out.index_copy_(0, look.rows, mixed)
        return q.new_zeros(tokens, heads, q.shape[2]) if out is None else out

    def _seen(self, layer: int, seen: Seen) -> KeysValues:
        parts = [(self.keys_values(layer, medium), count) for medium, count in seen]
        if len(parts) == 1:
            (keys, values), count = parts[0]
            return keys[:, :count], values[:, :count]
        return (
            torch.cat([keys[:, :count] for (keys, _), count in parts], dim=1),
            torch.cat([values[:, :count] for (_, values), count in parts], dim=1),
        )
