"""FlashAttention 2 (Dao, 2023) over block tables as a backend, if the package `flash_attn` is installed."""

from __future__ import annotations

import torch

from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.paged_step import PagedStep
from segue.messages.errors import ConfigError


class FlashAttention:
    """Implements `segue.kernels.attention.paged_step.AttentionBackend`. float16 and bfloat16; the block size must be a
    multiple of 256."""

    recordable = False  # the longest sequence is a host argument
    upcasts = False
    bidirectional = False
    page = 256

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: PagedStep, form: AttentionOptions
    ) -> torch.Tensor:
        from flash_attn import flash_attn_varlen_func

        if form.sinks is not None:
            raise ConfigError("FlashAttention 2 has no sinks; use attention: triton", field="attention")
        step.store.write(layer, step.slots, k.transpose(0, 1), v.transpose(0, 1))
        tables = step.tables
        queries = torch.cat([tables.begins, tables.begins[-1:] + tables.counts[-1:]])
        keys = torch.nn.functional.pad(tables.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return flash_attn_varlen_func(
            q.transpose(0, 1).contiguous(),
            step.store.keys[layer],
            step.store.values[layer],
            cu_seqlens_q=queries,
            cu_seqlens_k=keys,
            max_seqlen_q=max(part.stop - part.start for part in step.parts),
            max_seqlen_k=max(part.stop for part in step.parts),
            softmax_scale=form.scaling,
            causal=True,
            window_size=(-1 if form.window is None else form.window - 1, 0),
            softcap=form.softcap or 0.0,
            block_table=tables.blocks.contiguous(),
        )
