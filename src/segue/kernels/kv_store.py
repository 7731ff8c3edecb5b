"""Paged keys and values: per layer a tensor of blocks; a token lives in slot `block * block_size + offset`."""

from __future__ import annotations

import math

import numpy as np
import torch


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that cost nothing until they are used: on a CPU the system hands out zeroed pages at the first touch, where
    `torch.zeros` writes all of them (gigabytes, at every start)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


class KVStore:
    """K and V of all layers, `[num_blocks, block_size, kv_heads, head_dim]` each, and optionally one captured row per
    token, which lives and dies with its block.

    Memory is allocated once. Who owns which block is the engine's business.
    """

    def __init__(
        self,
        *,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        capture_width: int = 0,
        capture_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.block_size = block_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.device = device
        shape = (num_blocks, block_size, kv_heads, head_dim)
        # zeros, not empty: padded positions are masked by adding -inf, and -inf + NaN would be NaN
        self.keys = [_zeros(shape, dtype, device) for _ in range(layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(layers)]
        self.rows = _zeros((num_blocks * block_size, capture_width), capture_dtype, device) if capture_width else None
        """[slots, capture_width]"""
        self._key_slots = [keys.view(-1, kv_heads, head_dim) for keys in self.keys]
        self._value_slots = [values.view(-1, kv_heads, head_dim) for values in self.values]
        self._key_blocks = [keys.view(num_blocks, -1) for keys in self.keys]
        self._value_blocks = [values.view(num_blocks, -1) for values in self.values]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put `[tokens, kv_heads, head_dim]` keys and values into `slots` [tokens]."""
        self._key_slots[layer].index_copy_(0, slots, keys)
        self._value_slots[layer].index_copy_(0, slots, values)

    def read(self, layer: int, blocks: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `blocks` [sequences * n], as `[sequences, kv_heads, n * block_size, head_dim]`."""
        shape = (sequences, -1, self.kv_heads, self.head_dim)
        keys = self._key_blocks[layer].index_select(0, blocks).view(shape).transpose(1, 2)
        values = self._value_blocks[layer].index_select(0, blocks).view(shape).transpose(1, 2)
        return keys, values

    def scrub(self, blocks: list[int]) -> None:
        """Zero the K and V of these blocks."""
        where = torch.tensor(blocks, dtype=torch.long, device=self.device)
        for layer in (*self.keys, *self.values):
            layer.index_fill_(0, where, 0)
