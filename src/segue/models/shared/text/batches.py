"""Batch whole texts for an encoder: assign them to buckets, and pad them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def bucket(length: int) -> int:
    """Texts of one bucket share a call: powers of two up to 64, then steps of 64, so that little is padding."""
    if length <= 64:
        return max(8, 1 << (length - 1).bit_length())
    return -(-length // 64) * 64


def padded(rows: Sequence[torch.Tensor], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids, [tokens] long each → (ids [B, T], mask [B, T]: 1 at tokens), padded at the end."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    return ids, mask
