"""Cross-attention of a step's tokens to the media of their requests.

A layer that attends to an image has keys and values for the image's rows, the same for every token after the image. No
mask is needed: tokens with the same cross-attention inputs form one call over exactly those, whichever requests they
belong to. Tokens of requests without media get zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention

Seen: TypeAlias = tuple[tuple[bytes, int], ...]
"""A token's cross-attention inputs: (medium, number of its rows, counted from the first), in order."""
KeysValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of all rows of a medium in one layer: [kv_heads, n, head_dim] and [kv_heads, n, value_dim]."""


@dataclass(frozen=True, slots=True)
class Look:
    """Tokens of a step with the same cross-attention inputs."""

    rows: torch.Tensor
    """[n] long: their indices in the flat batch."""
    seen: Seen


@dataclass(frozen=True, slots=True)
class CrossStep:
    """The keyword argument `across` of a decoder's forward."""

    layers: frozenset[int]
    """Layers that attend to media; all others attend to tokens."""
    looks: list[Look]
    """Each token is in at most one of them."""
    keys_values: Callable[[int, bytes], KeysValues]
    """(layer, medium) → its keys and values."""
    made: Callable[[int, torch.Tensor, torch.Tensor], object] | None = None
    """Receives the keys and values that a layer computed for new media: (layer, keys, values), [kv_heads, rows of all
    of them, dim] each. None: layers write them to their cache."""

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [heads, tokens, head_dim] → [tokens, heads, value_dim]; zeros for tokens without media."""
        heads, tokens, _ = q.shape
        out: torch.Tensor | None = None
        for look in self.looks:
            keys, values = self._seen(layer, look.seen)
            # query heads that share keys become further queries, so keys are not repeated
            queries = q.index_select(1, look.rows).reshape(1, keys.shape[0], -1, q.shape[2])
            mixed = scaled_dot_product_attention(queries, keys[None], values[None], scale=scaling)
            mixed = mixed.reshape(heads, -1, values.shape[2]).transpose(0, 1)
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
