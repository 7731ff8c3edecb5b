"""Stores of random keys and values, and attention over them as torch computes it."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from segue.kernels.attention.paged_attention import (
    AttentionOptions,
    ReferenceAttention,
    TorchAttention,
)
from segue.kernels.attention.paged_step import Part, paged_step, step_order
from segue.kernels.attention.spans import SPAN_BYTES
from segue.kernels.kv.layout import uniform
from segue.kernels.kv.store import KVStore

SIZE, DIM = 4, 8


def store(kv_heads: int, device: str = "cpu", size: int = SIZE, dim: int = DIM) -> KVStore:
    return KVStore(
        uniform(2, kv_heads, dim),
        num_blocks=64,
        block_size=size,
        dtype=torch.float32,
        device=torch.device(device),
    )


def layout(spans: list[tuple[int, int]], pieces: int = 64, size: int = SIZE) -> list[Part]:
    """Parts with disjoint block tables, in the order of a step; the pool is cut into so many consecutive pieces."""
    order = torch.arange(64).view(pieces, -1)[torch.randperm(pieces, generator=torch.Generator().manual_seed(1))]
    order = order.flatten().flip(0).tolist()
    parts = []
    for start, tokens in spans:
        need = -(-(start + tokens) // size)
        parts.append(Part([order.pop() for _ in range(need)], start, start + tokens))
    return sorted(parts, key=step_order)


forms = st.builds(
    lambda window, softcap, sinks: (window, softcap, sinks),
    st.sampled_from([None, 1, 3, 6, 100]),
    st.sampled_from([None, None, 5.0]),
    st.booleans(),
)


def compare(
    device, spans, heads, form, seed, pieces=64, span_bytes=SPAN_BYTES, backend=None, size=SIZE, dim=DIM
) -> None:
    generator = torch.Generator().manual_seed(seed)
    window, softcap, with_sinks = form
    sinks = torch.randn(heads[0], generator=generator).to(device) if with_sinks else None
    wanted = AttentionOptions(0.3, window, softcap, sinks)
    parts = layout(spans, pieces, size)
    tokens = sum(part.stop - part.start for part in parts)
    q = torch.randn(heads[0], tokens, dim, generator=generator).to(device)
    k, v = (torch.randn(heads[1], tokens, dim, generator=generator).to(device) for _ in range(2))
    results, stores = [], []
    for tried in (backend or TorchAttention(span_bytes), ReferenceAttention()):
        own = store(heads[1], device, size, dim)
        past = torch.Generator().manual_seed(seed)
        for layer in (*own.keys, *own.values):
            layer.copy_(torch.randn(layer.shape, generator=past))
        results.append(tried.attend(1, q, k, v, paged_step(own, parts), wanted))
        stores.append(own)
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    assert results[0].shape == (tokens, heads[0], dim)
    for ours, theirs in zip(stores[0].keys + stores[0].values, stores[1].keys + stores[1].values, strict=True):
        assert torch.equal(ours, theirs)
