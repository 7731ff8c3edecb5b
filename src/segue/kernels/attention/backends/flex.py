"""FlexAttention (Dong et al., *Flex Attention: A Programming Model for Generating Optimized Attention Kernels*, 2024)
over block tables, in kernels that torch compiles.

A query may see any slot of the whole store. A mask selects the slots by their block's position in the sequence, and
lists of blocks select the tiles to visit (the paper's section on paged attention). Single queries form one batch, each
chunk its own. On a CPU it runs uncompiled only, over the whole store, which is for tests: torch 2.13 cannot compile
soft caps, windows or log-sum-exps there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.paged_step import PagedStep, Part, leading_singles

_QUERIES = 128
"""Queries per row of a block mask."""

Attention = Callable[..., tuple[torch.Tensor, Any]]


class FlexAttention:
    """Implements `segue.kernels.attention.paged_step.AttentionBackend`."""

    recordable = False  # masks are rebuilt in every step
    upcasts = False
    bidirectional = True
    page = 128
    """Its kernels read up to this many tokens at once, all of one block."""

    def __init__(self, attention: Attention) -> None:
        """`attention`: torch's `flex_attention`, compiled, or uncompiled for tests."""
        self._attention = attention

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: PagedStep, form: AttentionOptions
    ) -> torch.Tensor:
        step.store.write(layer, step.slots, k.transpose(0, 1), v.transpose(0, 1))
        keys, values = (kv.transpose(0, 1)[None] for kv in step.store.slots(layer))  # [1, kv_heads, slots, dim]
        out = q.new_empty(q.shape[1], q.shape[0], v.shape[2])
        for begin, end, count, mask in _masks(step, form.window):
            # [sequences, heads, queries, dim]
            queries = q[:, begin:end].unflatten(1, (-1, count)).transpose(0, 1)
            mixed, aux = self._attention(
                queries,
                keys,
                values,
                score_mod=None if form.softcap is None else _capped(q.new_tensor(form.softcap)),
                block_mask=mask,
                scale=form.scaling,
                enable_gqa=q.shape[0] != k.shape[0],
                return_aux=AuxRequest(lse=form.sinks is not None),
            )
            if form.sinks is not None:  # sinks add one more term to the softmax denominator
                mixed = mixed * torch.sigmoid(aux.lse - form.sinks[:, None].float())[..., None].to(mixed.dtype)
            out[begin:end] = mixed.transpose(1, 2).flatten(0, 1)
        return out


def compiled() -> Attention:
    """`flex_attention` compiled for the device."""
    made: Attention = torch.compile(flex_attention, dynamic=True)
    return made


def _capped(cap: torch.Tensor) -> Callable[..., torch.Tensor]:
    def mod(score: torch.Tensor, b: Any, h: Any, query: Any, key: Any) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return mod


def _masks(step: PagedStep, window: int | None) -> list[tuple[int, int, int, BlockMask]]:
    """(begin, end, queries per sequence, mask) of ranges of flat tokens; built once per step and window."""
    key = ("flex", window)
    if key not in step.plans:
        singles = step.parts[: leading_singles(step.parts)]
        groups = [singles, *([part] for part in step.parts[len(singles) :])]
        begin = 0
        made = []
        for parts in groups:
            if parts:
                count = parts[0].stop - parts[0].start
                made.append((begin, begin + len(parts) * count, count, _mask(step, parts, count, window)))
                begin += len(parts) * count
        step.plans[key] = made
    found: list[tuple[int, int, int, BlockMask]] = step.plans[key]
    return found


def _mask(step: PagedStep, parts: Sequence[Part], count: int, window: int | None) -> BlockMask:
    """The block mask of these sequences with `count` queries each."""
    store = step.store
    size = store.block_size
    places = torch.full((len(parts), store.num_blocks), -1, dtype=torch.int32)
    indices = torch.zeros((len(parts), store.num_blocks), dtype=torch.int32)
    seen = torch.zeros(len(parts), dtype=torch.int32)
    for row, part in enumerate(parts):
        first = 0 if window is None else max(0, part.start + 1 - window) // size
        blocks = torch.tensor(part.blocks[first : -(-part.stop // size)])
        places[row, blocks] = torch.arange(first, first + len(blocks), dtype=torch.int32)
        indices[row, : len(blocks)] = blocks
        seen[row] = len(blocks)
    starts = torch.tensor([part.start for part in parts], dtype=torch.int32).to(store.device)
    places = places.to(store.device)
    # tensors, because compiled code turns changing numbers into symbols, which not every kernel accepts
    reach = None if window is None else starts.new_tensor(window)
    bidirectional = any(not part.causal for part in parts)
    ends = torch.from_numpy(np.stack([part.reaches() for part in parts])).to(store.device) if bidirectional else None

    def visible(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        place = places[b, slot // size]
        key = place * size + slot % size
        at = starts[b] + query
        both = (place >= 0) & (key <= at if ends is None else key < ends[b, query])
        return both if reach is None else both & (key > at - reach)

    rows = -(-count // _QUERIES)
    return BlockMask.from_kv_blocks(
        seen.to(store.device)[:, None, None].expand(-1, 1, rows).contiguous(),
        indices.to(store.device)[:, None, None].expand(-1, 1, rows, -1).contiguous(),
        BLOCK_SIZE=(_QUERIES, size),
        mask_mod=visible,
        seq_lengths=(count, store.num_blocks * size),
        compute_q_blocks=False,
    )
