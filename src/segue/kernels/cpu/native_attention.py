"""The attention backend for CPUs in float32: compiled kernels read K and V in place.

`segue.kernels.cpu.native` computes single queries and chunks; the torch backend computes unsupported options and
shapes."""

from __future__ import annotations

import ctypes

import torch

from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.paged_attention import TorchAttention
from segue.kernels.attention.paged_step import Chunk, PagedStep
from segue.kernels.cpu.full_attention import attend_chunk
from segue.kernels.cpu.native import Attention, Library
from segue.kernels.graphs.replay import NotRecordable
from segue.kernels.kv.store import KVStore

_TASKS = 4
"""Tasks per thread that long sequences are split into, in addition to one per sequence."""
_MOST_DIM = 256


class NativeAttention:
    """Implements `segue.kernels.attention.paged_step.AttentionBackend`."""

    recordable = True
    upcasts = True
    bidirectional = True
    page = 1

    def __init__(self, compiled: Library) -> None:
        self._compiled = compiled
        self._torch = TorchAttention()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: PagedStep, form: AttentionOptions
    ) -> torch.Tensor:
        store = step.store
        if not self._can(layer, q, store, form):
            if not step.parts:
                raise NotRecordable(f"attention of layer {layer} is not supported by the compiled kernels")
            return self._torch.attend(layer, q, k, v, step, form)
        self._write(layer, k, v, step)
        heads, tokens, _ = q.shape
        out = q.new_empty(tokens, heads, v.shape[2])
        if step.tables.singles:
            self._decode(layer, q, step, form, out)
        for chunk in step.chunks:
            self._chunk(layer, q, step, chunk, form, out)
        return out

    def _can(self, layer: int, q: torch.Tensor, store: KVStore, form: AttentionOptions) -> bool:
        _, dim, value_dim = store.layout.shapes[layer]
        lanes = self._compiled.lanes
        return (
            form.plain
            and store.stored is None
            and q.dtype == store.dtype == torch.float32
            and q.stride(2) == 1
            and dim % lanes == value_dim % lanes == 0
            and max(dim, value_dim) <= _MOST_DIM
            and form.scaling > 0
        )

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor, step: PagedStep) -> None:
        if k.stride(2) != 1 or v.stride(2) != 1:
            return step.store.write(layer, step.slots, k.transpose(0, 1), v.transpose(0, 1))
        keys, values = step.store.slots(layer)
        self._compiled.write(
            *(k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1)),
            *(keys.data_ptr(), keys.stride(0), keys.stride(1), values.data_ptr(), values.stride(0), values.stride(1)),
            *(step.slots.data_ptr(), k.shape[1], k.shape[0], k.shape[2], v.shape[2]),
        )
        return None

    def _chunk(
        self, layer: int, q: torch.Tensor, step: PagedStep, chunk: Chunk, form: AttentionOptions, out: torch.Tensor
    ) -> None:
        """Several queries of one sequence, written to their rows of `out` [tokens, heads, value_dim]."""
        part = slice(chunk.begin, chunk.end)
        keys, values = step.store.slots(layer)
        attend_chunk(
            *(self._compiled, q[:, part], keys, values, chunk.table, step.store.block_size),
            *(chunk.spans(form.window), out[part], form.scaling),
        )

    def _decode(self, layer: int, q: torch.Tensor, step: PagedStep, form: AttentionOptions, out: torch.Tensor) -> None:
        """Single queries, which come first, written to the first rows of `out` [tokens, heads, value_dim]."""
        tables, store = step.tables, step.store
        keys, values = store.slots(layer)
        kv_heads, dim, value_dim = store.layout.shapes[layer]
        count, heads, threads = tables.singles, q.shape[0], torch.get_num_threads()
        more = _TASKS * threads
        scratch = q.new_empty((count + more) * heads * (value_dim + 2) + count + 1)
        given = Attention(
            *(q.data_ptr(), q.stride(1), q.stride(0)),
            *(keys.data_ptr(), keys.stride(0), keys.stride(1)),
            *(values.data_ptr(), values.stride(0), values.stride(1)),
            *(tables.blocks.data_ptr(), tables.blocks.stride(0), tables.lengths.data_ptr()),
            *(count, heads, kv_heads, dim, value_dim, store.block_size, form.window or 0, form.scaling),
            out.data_ptr(),
        )
        self._compiled.attend(self._compiled.number, ctypes.byref(given), more, scratch.data_ptr(), threads)
