"""FlashInfer's paged attention (Ye et al., 2025) as a backend, if the package is installed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.paged_step import PagedStep
from segue.messages.errors import ConfigError

_WORKSPACE = 256 << 20
"""Bytes for its split-KV parts: twice the library's own recommendation."""


class FlashInferAttention:
    """Implements `segue.kernels.attention.paged_step.AttentionBackend`. Each step is planned once per set of attention
    options in it."""

    recordable = False  # plans are made on the host
    upcasts = False
    bidirectional = False
    page = 1

    def __init__(self, device: torch.device) -> None:
        self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        self._wrappers: dict[Any, Any] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: PagedStep, form: AttentionOptions
    ) -> torch.Tensor:
        if form.sinks is not None:
            raise ConfigError("FlashInfer's paged attention has no sinks; use attention: triton", field="attention")
        step.store.write(layer, step.slots, k.transpose(0, 1), v.transpose(0, 1))
        keys, values = step.store.keys[layer], step.store.values[layer]
        key = (form.scaling, form.window, form.softcap, q.shape[0], k.shape[0], q.shape[2], v.shape[2])
        if key not in step.plans:
            step.plans[key] = self._plan(key, q, keys, step, form)
        return step.plans[key].run(q.transpose(0, 1).contiguous(), (keys, values))

    def _plan(self, key: Any, q: torch.Tensor, keys: torch.Tensor, step: PagedStep, form: AttentionOptions) -> Any:
        if key not in self._wrappers:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            self._wrappers[key] = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        wrapper = self._wrappers[key]
        size = step.store.block_size
        counts = [-(-part.stop // size) for part in step.parts]
        queries = np.cumsum([0, *(part.stop - part.start for part in step.parts)], dtype=np.int32)
        pages = np.cumsum([0, *counts], dtype=np.int32)
        blocks = np.fromiter(
            itertools.chain.from_iterable(part.blocks[:count] for part, count in zip(step.parts, counts, strict=True)),
            dtype=np.int32,
        )
        last = np.array([(part.stop - 1) % size + 1 for part in step.parts], dtype=np.int32)
        _, _, heads, kv_heads, width, value_width = key[1:]
        wrapper.plan(
            *(torch.from_numpy(array).to(q.device) for array in (queries, pages, blocks, last)),
            heads,
            kv_heads,
            width,
            size,
            head_dim_vo=value_width,
            causal=True,
            sm_scale=form.scaling,
            window_left=-1 if form.window is None else form.window - 1,
            logits_soft_cap=form.softcap,
            q_data_type=q.dtype,
            kv_data_type=keys.dtype,
        )
        return wrapper
