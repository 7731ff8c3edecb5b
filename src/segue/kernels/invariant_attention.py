"""Attention whose bits do not depend on what else is in the batch, nor on how a sequence was cut into steps.

Queries are taken in tiles at absolute borders: tile t holds positions [16 t, 16 t + 16), with zeros where a position is
not in this step, against the keys of tiles 0 to t. So every product and every softmax has a shape that follows from t
alone, and a query has the same place in it whether it is decoded, prefilled, or prefilled behind a cached prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from segue.kernels.form import Form
from segue.kernels.kv_store import KVStore
from segue.kernels.paged_step import additive
from segue.kernels.part import Part
from segue.kernels.staging import upload

TILE = 16
"""Queries per tile."""


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Positions of one sequence between two borders."""

    begin: int
    end: int
    """Their range of flat tokens."""
    first: int
    """The border: the position of the tile's first row."""
    offset: int
    """Row of the first position that is there."""
    blocks: torch.Tensor
    """[n] long: the blocks of all keys up to the next border; beyond the sequence's own, its last one, never seen."""


@dataclass(slots=True)
class InvariantStep:
    """The keyword argument `paged` of a decoder's forward over so many tokens, and padding behind them."""

    store: KVStore
    parts: list[Part]
    tokens: int
    slots: torch.Tensor
    """[tokens] long"""
    tiles: list[QueryTile]
    _masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def of(self, layer: int) -> InvariantStep:
        """The step as this layer sees it."""
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
    """Plan a step over the whole of `parts`; blocks of a part begin with the sequence's first."""
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
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: InvariantStep, form: Form
) -> torch.Tensor:
    """As `AttentionBackend.attend`; rows behind the step's tokens are padding, and zero."""
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
