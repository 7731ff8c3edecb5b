"""Paged keys and values behind the library's cache interface, for layers that run their own attention.

A layer writes new keys and values into the cache and gets all that its queries may see, gathered from the blocks.
Sequences with one query each are rows of one batch, padded on the left as in the library's `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from segue.kernels.attention.paged_step import PagedStep
from segue.kernels.staging import upload_all


class GatheredCache(Cache):
    """The cache of some sequences of a step, all with the same number of queries."""

    def __init__(self, step: PagedStep, begin: int, end: int, blocks: torch.Tensor, lengths: Sequence[int]) -> None:
        """Covers the flat tokens [begin, end) of a step. `blocks` [rows * n] long; `lengths`: tokens that a row's last
        query sees, including itself."""
        super().__init__(layers=[])
        self._store = step.store
        self._slots = step.slots[begin:end]
        self._blocks = blocks
        self._rows = len(lengths)
        self._longest = max(lengths)
        self._before = self._longest - (end - begin) // self._rows
        self._written: set[int] = set()
        places = torch.arange(self._longest) - self._longest + torch.tensor(list(lengths))[:, None]
        mask, self._places = upload_all([(places >= 0).long().numpy(), places.clamp(min=0).numpy()], step.store.device)
        self.mask = mask
        """[rows, longest] long: 1 for tokens, 0 for padding, as decoders expect it."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *others: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, heads, queries, dim] each → [rows, heads, longest, dim]."""
        keys, values = (new.transpose(1, 2).flatten(0, 1) for new in (key_states, value_states))
        self._store.write(layer_idx, self._slots, keys, values)
        self._written.add(layer_idx)
        keys, values = self._store.read(layer_idx, self._blocks, self._rows)
        return self._aligned(keys), self._aligned(values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of cached tokens; includes those of this step once the layer has written them."""
        return self._longest if layer_idx in self._written else self._before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Number of tokens before the queries."""
        return self._before

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(number of keys, number of keys skipped before them)."""
        return self._longest, 0

    def _aligned(self, kept: torch.Tensor) -> torch.Tensor:
        if self._rows == 1:
            return kept[:, :, : self._longest]
        return kept.gather(2, self._places[:, None, :, None].expand(-1, kept.shape[1], -1, kept.shape[3]))
