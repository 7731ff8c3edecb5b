"""Whole texts in one call of an encoder: which share it, how they are padded, how long they may be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segue.models.library import PreTrainedConfig

_AFTER_PADDING = frozenset(("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text"))
"""Model types whose first position is the one after the padding token's id."""


def bucket(length: int) -> int:
    """Texts of one bucket share a call: powers of two up to 64, then steps of 64, so that little of it is padding."""
    if length <= 64:
        return max(8, 1 << (length - 1).bit_length())
    return -(-length // 64) * 64


def padded(rows: Sequence[torch.Tensor], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids, [tokens] long each → (ids [B, T], mask [B, T]: 1 where a token is), padded behind."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    return ids, mask


def positions(config: PreTrainedConfig) -> int:
    """How many tokens the model's positions hold."""
    longest: int = config.max_position_embeddings
    if config.model_type in _AFTER_PADDING:
        longest -= (config.pad_token_id or 0) + 1
    return longest
