"""The attention backend of the Triton kernels: for GPUs, and for Triton's interpreter in tests."""

from __future__ import annotations

import torch

from segue.kernels.attention.backends.triton_kernels import FILLED, Splits, Tables, Tile, decode, prefill, split_keys
from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.paged_step import PagedStep

_FP8 = (8, 9)
"""Lowest compute capability on which Triton reads float8_e4m3fn."""
_INTERPRETED = 2
"""Assumed number of multiprocessors for the interpreter."""


class TritonAttention:
    """Implements `segue.kernels.attention.paged_step.AttentionBackend`; K and V are read in place."""

    recordable = True
    bidirectional = True
    page = 1

    def __init__(self, device: torch.device, tile: Tile | None = None, filled: int = FILLED) -> None:
        """`tile`: of single queries, in place of `decode_tile`'s. `filled`: splits of keys per multiprocessor."""
        self._tile, self._filled = tile, filled
        self.upcasts = device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FP8
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED
        )

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: PagedStep, form: AttentionOptions
    ) -> torch.Tensor:
        step.store.write(layer, step.slots, k.transpose(0, 1), v.transpose(0, 1))
        keys, values = step.store.keys[layer], step.store.values[layer]
        tables = step.tables
        heads, tokens, _ = q.shape
        rows = q.transpose(0, 1)
        out = q.new_empty(tokens, heads, v.shape[2])
        singles = tables.singles
        if singles:
            splits = self._splits(step, k.shape[0], max(q.shape[2], v.shape[2]), q.dtype, form.window)
            decode(rows[:singles], keys, values, tables.blocks[:singles], splits, form, out[:singles])
        if singles < len(tables.lengths):
            prefill(
                rows,
                keys,
                values,
                Tables(tables.blocks[singles:], tables.lengths[singles:]),
                tables.begins[singles:],
                tables.counts[singles:],
                tables.longest_chunk,
                form,
                out,
                tables.reaches,
            )
        return out

    def _splits(self, step: PagedStep, kv_heads: int, width: int, dtype: torch.dtype, window: int | None) -> Splits:
        """The splits of a step, shared by all layers with the same shape."""
        key = ("splits", kv_heads, width, dtype, window)
        if key not in step.plans:
            tables = step.tables
            lengths = tables.lengths[: tables.singles]
            step.plans[key] = split_keys(
                *(lengths, tables.longest_key, kv_heads, width, dtype, self._processors, window),
                tile=self._tile,
                filled=self._filled,
            )
        found: Splits = step.plans[key]
        return found
