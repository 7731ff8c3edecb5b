"""Batch-invariant attention: bit-identical whatever else is in the batch and however a sequence is split into steps.

Queries are computed in tiles at absolute positions: tile t holds positions [16 t, 16 t + 16), with zeros for positions
not in this step, against the keys of tiles 0 to t. So every GEMM and softmax has a shape that depends on t alone, and a
query has the same row in it whether it is decoded, prefilled, or prefilled after a cached prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.paged_step import Part, additive
from segue.kernels.kv.store import KVStore
from segue.kernels.staging import upload

TILE = 16
"""Queries per tile."""


@dataclass(frozen=True, slots=True)
class QueryTile:
    """The positions of one sequence that fall into one tile."""

    begin: int
    end: int
    """Their range of flat tokens."""
    first: int
    """Position of the tile's first row."""
    offset: int
    """Row of the first position in this step."""
    blocks: torch.Tensor
    """[n] long: blocks of all keys up to the tile's end; beyond the sequence's own, its last block, which is masked."""


@dataclass(slots=True)
class InvariantStep:
    """The keyword argument `paged` of a decoder's forward over `tokens` tokens, followed by padding."""

    store: KVStore
    parts: list[Part]
    tokens: int
    slots: torch.Tensor
    """[tokens] long"""
    tiles: list[QueryTile]
    _masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def of(self, layer: int) -> InvariantStep:
        """The step from the view of this layer."""
        return self

    def mask(self, tile: QueryTile, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[16, keys], 0 where a query sees a key and -inf elsewhere."""
        place = (tile.first, window, dtype)
        mask = self._masks.get(place)
        if mask is None:
            key = torch.arange(len(tile.blocks) * self.store.block_size, device=tile.blocks.device)
            query = torch.arange(tile.first, tile.first + TILE, device=tile.blocks.device)[:, None]
            seen = key <= query
            if window is not None:
                seen &= key > query - window
            mask = self._masks[place] = additive(seen, dtype)
        return mask


def invariant_step(store: KVStore, parts: list[Part]) -> InvariantStep:
    """Plan a step over all of `parts`; the blocks of a part start with the sequence's first."""
    size = store.block_size
    slots: list[np.ndarray] = []
    tiles: list[QueryTile] = []
    begin = 0
    for part in parts:
        known = np.array(part.blocks[: -(-part.stop // size)])
        position = np.arange(part.start, part.stop)
        slots.append(known[position // size] * size + position % size)
        start = part.start
        while start < part.stop:
            first = start // TILE * TILE
            stop = min(part.stop, first + TILE)
            table = np.full(-(-(first + TILE) // size), known[-1])
            table[: len(known)] = known[: len(table)]
            end = begin + stop - start
            tiles.append(QueryTile(begin, end, first, start - first, upload(table, store.device)))
            begin, start = end, stop
    return InvariantStep(store, parts, begin, upload(np.concatenate(slots), store.device), tiles)


def invariant_attention(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: InvariantStep, form: AttentionOptions
) -> torch.Tensor:
    """Like `AttentionBackend.attend`; rows after the step's tokens are padding, and zero."""
    real = step.tokens
    step.store.write(layer, step.slots, k[:, :real].transpose(0, 1), v[:, :real].transpose(0, 1))
    heads, tokens, dim = q.shape
    kv_heads = k.shape[0]
    out = q.new_zeros(tokens, heads, v.shape[2])
    for tile in step.tiles:
        rows = slice(tile.offset, tile.offset + tile.end - tile.begin)
        queries = q.new_zeros(heads, TILE, dim)
        queries[:, rows] = q[:, tile.begin : tile.end]
        keys, values = (kv[0].contiguous() for kv in step.store.read(layer, tile.blocks, 1))
        scores = torch.bmm(queries.view(kv_heads, -1, dim), keys.transpose(1, 2)) * form.scaling
        if form.softcap is not None:
            scores = torch.tanh(scores / form.softcap) * form.softcap
        scores = scores.view(heads, TILE, -1) + step.mask(tile, form.window, q.dtype)
        if form.sinks is not None:
            column = form.sinks.to(scores.dtype).view(heads, 1, 1).expand(-1, TILE, 1)
            shares = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        mixed = torch.bmm(shares.reshape(kv_heads, -1, shares.shape[-1]), values)
        out[tile.begin : tile.end] = mixed.view(heads, TILE, -1)[:, rows].transpose(0, 1)
    return out
