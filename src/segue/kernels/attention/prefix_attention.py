"""Attention of rows that follow a cached prefix and are not cached themselves: a denoiser whose latents attend to a
prompt in the paged KV store.

The rows of one block see each other in both directions, and all tokens of their prefix. Their keys and values are those
of this call; the store is only read, so any number of blocks may follow one prefix, in one call or in several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.spans import attend, slot_runs, together
from segue.kernels.kv.store import KVStore
from segue.messages.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PrefixBlock:
    """Rows of a flat batch that follow one prefix."""

    begin: int
    end: int
    """Their range in the flat batch."""
    blocks: Sequence[int]
    """Block table of the prefix; blocks after its last token are not read."""
    length: int
    """Tokens of the prefix; may be 0."""


@dataclass(frozen=True, slots=True)
class PrefixStep:
    """The keyword argument `paged` of a decoder's forward over such rows. All layers have full attention."""

    store: KVStore
    rows: Sequence[PrefixBlock]
    """Together they cover the flat batch, in order."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionOptions
    ) -> torch.Tensor:
        """q [heads, tokens, head_dim], k [kv_heads, tokens, head_dim], v [kv_heads, tokens, value_dim] →
        [tokens, heads, value_dim]. Raises `ConfigError` for windows, soft caps and sinks."""
        if not form.plain or form.window is not None:
            raise ConfigError("attention to a cached prefix supports neither windows nor soft caps nor sinks")
        heads, tokens, dim = q.shape
        out = q.new_empty(tokens, heads, v.shape[2])
        for row in self.rows:
            part = slice(row.begin, row.end)
            # query heads that share keys become further queries, so keys are not repeated
            queries = q[:, part].reshape(1, k.shape[0], -1, dim)
            mixed = self._mixed(layer, queries, k[None, :, part], v[None, :, part], row, form.scaling)
            out[part] = mixed.reshape(heads, -1, v.shape[2]).transpose(0, 1)
        return out

    def _mixed(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: PrefixBlock, scaling: float
    ) -> torch.Tensor:
        """All tensors [1, kv_heads, n, dim]."""
        store, size = self.store, self.store.block_size
        if not row.length:
            return scaled_dot_product_attention(q, k, v, scale=scaling)
        runs = slot_runs(row.blocks, 0, row.length, size)
        if len(runs) == 1 and store.in_place(layer):
            [(begin, end)] = runs
            keys, values = (kv[None, begin:end].transpose(1, 2) for kv in store.slots(layer))
            mixed, _ = together(attend(q, k, v, scaling), attend(q, keys, values, scaling))
            return mixed
        blocks = torch.tensor(row.blocks[: -(-row.length // size)], device=store.device)
        keys, values = (kv[:, :, : row.length] for kv in store.read(layer, blocks, 1))
        return scaled_dot_product_attention(
            q, torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2), scale=scaling
        )
