"""Stands in for the library's cache, for layers that count positions by it."""

from __future__ import annotations

from typing import Any

import torch

from segue.models.shared.library import PreTrainedConfig


def counts_by_cache(config: PreTrainedConfig) -> bool:
    """Whether layers of this text config take positions from the cache and not from `position_ids`: those that scale
    queries by position (Llama 4)."""
    return "attn_temperature_tuning" in config and bool(config.attn_temperature_tuning)


class NoCache:
    """Keeps nothing; reports that token i of the flat batch, to which such layers add i, has position
    `positions[i]`."""

    def __init__(self, positions: torch.Tensor) -> None:
        """positions: [tokens] long."""
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """[tokens]: the offset added to 0, 1, 2, …"""
        return self._before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Used for masks, which are only built in the load check."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(number of keys, offset): the keys of this call alone."""
        return query_length, 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values unchanged: the paged store keeps them."""
        return keys, values
