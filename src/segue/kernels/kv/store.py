"""The paged KV store: a tensor of blocks per layer; a token is in slot `block * block_size + offset`."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from segue.kernels.attention.interface import Attends
from segue.kernels.kv.layout import NOTHING, KVLayout
from segue.kernels.staging import upload
from segue.messages.errors import ConfigError


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that are allocated only when used: on a CPU the system hands out zeroed pages at the first touch, whereas
    `torch.zeros` writes all of them (gigabytes, at every start).

    Uses small pages: the first token in a huge one would wait for 2 MiB of zeros, in every layer's K and V (230 ms for
    24 layers, in the middle of some prompt).
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"there is no memory for {size} bytes of cache ({error}): set fewer kv_blocks, or a smaller memory_share",
            field="kv_blocks",
        ) from error
    if _SMALL_PAGES is not None:
        pages.madvise(_SMALL_PAGES)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


_SMALL_PAGES: int | None = getattr(mmap, "MADV_NOHUGEPAGE", None)
"""Only Linux has huge pages and this constant."""


class KVStore:
    """K and V of all layers, and optionally one captured row per token, stored with its block.

    Layers of different groups share tensors (`layout`); a block belongs to one group at a time. Captured rows are
    those of group 0. Memory is allocated once. The engine tracks the owners of blocks.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
        capture_width: int = 0,
        capture_dtype: torch.dtype = torch.float32,
        backend: Attends[Any] | None = None,
    ) -> None:
        """`backend`: computes attention on it; None: gathering and `scaled_dot_product_attention`. `dtype`: of values
        written and read; `stored`: the storage dtype, if float8_e4m3fn: values beyond its 448 are clamped."""
        self.layout = layout
        self.backend = backend
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.dtype = dtype
        self.stored = stored if stored != dtype else None
        """None: stored in `dtype`."""
        widths = [layout.widths(tensor) for tensor in range(layout.tensors)]
        # zeros, not empty: padded positions are masked by adding -inf, and -inf + NaN would be NaN
        kept = self.stored or dtype
        self._tensors = [
            (
                lazy_zeros((num_blocks, block_size, keys), kept, device),
                lazy_zeros((num_blocks, block_size, values), kept, device),
            )
            for keys, values in widths
        ]
        self.keys: list[torch.Tensor] = []
        """Per layer: a view [num_blocks, block_size, kv_heads, head_dim]."""
        self.values: list[torch.Tensor] = []
        """Per layer: a view [num_blocks, block_size, kv_heads, value_dim]."""
        nothing = torch.zeros(num_blocks, block_size, 0, dtype=kept, device=device)
        for shape, tensor in zip(layout.shapes, layout.tensor_of, strict=True):
            keys, values = self._tensors[tensor] if shape != NOTHING else (nothing, nothing)
            self.keys.append(_heads(keys, shape.kv_heads, shape.head_dim))
            self.values.append(_heads(values, shape.kv_heads, shape.value_dim))
        self.rows = (
            lazy_zeros((num_blocks * block_size, capture_width), capture_dtype, device) if capture_width else None
        )
        """[slots, capture_width]"""
        # not every operator moves 8-bit floats, so they are viewed as bytes
        self._key_slots = [_slots(_movable(keys)) for keys in self.keys]
        self._value_slots = [_slots(_movable(values)) for values in self.values]
        self._key_blocks = [_movable(keys).flatten(2) for keys in self.keys]
        self._value_blocks = [_movable(values).flatten(2) for values in self.values]
        self._tensors = [(_movable(keys), _movable(values)) for keys, values in self._tensors]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys [tokens, kv_heads, head_dim] and values [tokens, kv_heads, value_dim] to `slots` [tokens]."""
        self._key_slots[layer].index_copy_(0, slots, self._downcast(keys))
        self._value_slots[layer].index_copy_(0, slots, self._downcast(values))

    def as_kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that would be read back if `tensor` were written."""
        return self._upcast(self._downcast(tensor))

    def _downcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert to the storage format, viewed as a movable dtype."""
        if self.stored is None:
            return tensor
        most = torch.finfo(self.stored).max
        return tensor.clamp(-most, most).to(self.stored).view(torch.uint8)

    def _upcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert back from the storage format; rounding remains."""
        return tensor if self.stored is None else tensor.view(self.stored).to(self.dtype)

    def read(self, layer: int, blocks: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `blocks` [sequences * n], as `[sequences, kv_heads, n * block_size, head_dim]` (`value_dim`)."""
        shape = self.layout.shapes[layer]
        keys = self._upcast(self._key_blocks[layer].index_select(0, blocks))
        values = self._upcast(self._value_blocks[layer].index_select(0, blocks))
        return (
            keys.view(sequences, -1, shape.kv_heads, shape.head_dim).transpose(1, 2),
            values.view(sequences, -1, shape.kv_heads, shape.value_dim).transpose(1, 2),
        )

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each: K, V and captured rows. All sources are read before any target is
        written, so a block may be the target of one copy and the source of another."""
        if not pairs:
            return
        source, target = upload(np.array(pairs, dtype=np.int64), self.device).unbind(1)
        tensors = [tensor for pair in self._tensors for tensor in pair]
        if self.rows is not None:
            tensors.append(self.rows.view(-1, self.block_size, self.rows.shape[1]))
        for blocks in tensors:
            blocks.index_copy_(0, target, blocks.index_select(0, source))

    def slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All K and V of a layer, `[slots, kv_heads, head_dim]` (`value_dim`), in place; not where `stored` is set."""
        assert self.stored is None, "attention cannot use views of keys and values in a narrower storage dtype"
        return self._key_slots[layer], self._value_slots[layer]

    def in_place(self, layer: int) -> bool:
        """Whether attention on this device can use views of a layer's K and V (`slots`)."""
        shape = self.layout.shapes[layer]
        return self.stored is None and self.device.type == "cpu" and shape.head_dim == shape.value_dim

    def token_bytes(self, layer: int) -> int:
        """Bytes of the K and V of one token in one layer."""
        heads, key, value = self.layout.shapes[layer]
        return heads * (key + value) * self.keys[layer].element_size()

    def scrub_slots(self, slots: torch.Tensor) -> None:
        """Zero the K and V of these slots [n]."""
        for pair in self._tensors:
            for tensor in pair:
                tensor.flatten(0, 1).index_fill_(0, slots, 0)

    def scrub(self, blocks: list[int]) -> None:
        """Zero the K and V of these blocks."""
        where = upload(np.array(blocks, dtype=np.int64), self.device)
        for pair in self._tensors:
            for tensor in pair:
                tensor.index_fill_(0, where, 0)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.itemsize == 1 else tensor


def _heads(tensor: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """[blocks, block_size, at least heads * dim] → a view [blocks, block_size, heads, dim]."""
    return tensor[..., : heads * dim].unflatten(2, (heads, dim))


def _slots(view: torch.Tensor) -> torch.Tensor:
    """[blocks, block_size, heads, dim] → a view [slots, heads, dim]; narrow layers leave the end of a slot unused."""
    blocks, size, heads, dim = view.shape
    return view.as_strided((blocks * size, heads, dim), view.stride()[1:])
