"""The attention backend over the Triton kernels: for GPUs, and for Triton's interpreter in tests."""

from __future__ import annotations

import torch

from segue.kernels.form import Form
from segue.kernels.paged_step import PagedStep
from segue.kernels.triton_attention import Tables, decode, prefill, splits_for

_FP8 = (8, 9)
"""Compute capability from which on Triton reads float8_e4m3fn."""
_INTERPRETED = 2
"""Multiprocessors of a device that has none."""


class TritonAttention:
    """Implements `segue.kernels.paged_step.AttentionBackend`; K and V are read where they lie."""

    recordable = True
    mutual = True
    page = 1

    def __init__(self, device: torch.device) -> None:
        self.widens = device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FP8
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED
        )

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: PagedStep, form: Form
    ) -> torch.Tensor:
        step.store.write(layer, step.slots, k.transpose(0, 1), v.transpose(0, 1))
        keys, values = step.store.keys[layer], step.store.values[layer]
        tables = step.tables
        heads, tokens, _ = q.shape
        rows = q.transpose(0, 1)
        out = q.new_empty(tokens, heads, v.shape[2])
        singles = tables.singles
        if singles:
            splits = splits_for(singles, k.shape[0], tables.longest_key, self._processors)
            mine = Tables(tables.blocks[:singles], tables.lengths[:singles])
            decode(rows[:singles], keys, values, mine, splits, form, out[:singles])
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
