"""Compiled attention of many queries against torch's, for every kind of vectors that this CPU has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_stores import compare
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from segue.kernels.cpu.full_attention import attend_fully, compile_attention, full_attention
from segue.kernels.cpu.native import Library, libraries
from segue.kernels.cpu.native_attention import NativeAttention

compiled = pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
every = pytest.mark.parametrize("kernels", libraries(), ids=lambda kernels: f"set {kernels.number}")


def _given(shape: tuple[int, int, int, int, int, int], dims: tuple[int, int], seed: int) -> list[torch.Tensor]:
    """Queries, keys and values as slices of the output of one GEMM, which is wider."""
    batch, kv_heads, group, queries, keys, gap = shape
    generator = torch.Generator().manual_seed(seed)
    made = []
    for heads, tokens, dim in (
        (kv_heads * group, queries, dims[0]),
        (kv_heads, keys, dims[0]),
        (kv_heads, keys, dims[1]),
    ):
        whole = torch.randn(batch, tokens, heads, dim + gap, generator=generator)
        made.append(whole[..., gap:].transpose(1, 2))
    return made


def _attend(kernels: Library, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **said: torch.Tensor) -> torch.Tensor:
    batch, heads, queries, dim = q.shape
    out = torch.full((batch, queries, heads, v.shape[3]), torch.nan).transpose(1, 2)
    attend_fully(kernels, q, k, v, out, dim**-0.5, **said)
    return out


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (one.double().repeat_interleave(group, 1) for one in (k, v))
    return scaled_dot_product_attention(q.double(), k, v, attn_mask=mask).float()


shapes = st.tuples(
    *(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(1, 600)),
    st.integers(0, 5),
)


@compiled
@every
@settings(max_examples=80, deadline=None)
@given(
    shapes,
    st.tuples(st.integers(1, 140), st.integers(1, 140)),
    st.sampled_from(["all", "some", "spans"]),
    st.integers(0, 99),
)
def test_it_equals_torchs(kernels: Library, shape, dims, which: str, seed: int) -> None:
    q, k, v = _given(shape, dims, seed)
    queries, keys = q.shape[2], k.shape[2]
    generator = torch.Generator().manual_seed(seed)
    said, mask = {}, None
    if which == "some":
        seen = torch.rand(len(q), keys, generator=generator) < 0.7
        said, mask = {"seen": seen}, seen[:, None, None]
    if which == "spans":
        spans = torch.randint(0, keys + 1, (queries, 2), generator=generator).sort(1).values.int()
        place = torch.arange(keys)
        said, mask = {"spans": spans}, (spans[:, :1] <= place) & (place < spans[:, 1:])
    made = _attend(kernels, q, k, v, **said)
    torch.testing.assert_close(made, _exact(q, k, v, mask), rtol=1e-4, atol=2e-6)


@compiled
@every
@pytest.mark.parametrize(("before", "queries", "window"), [(0, 600, None), (700, 513, None), (300, 600, 270)])
def test_long_causal_chunks(kernels: Library, before: int, queries: int, window: int | None) -> None:
    spans = [(before, queries), (0, 2), (255, 2), (1, 255)]
    compare("cpu", spans, (6, 2), (window, None, False), 0, backend=NativeAttention(kernels), size=64, dim=48)


@compiled
@every
def test_a_row_does_not_depend_on_the_others_nor_on_what_is_masked(kernels: Library) -> None:
    q, k, v = _given((3, 2, 1, 50, 400, 0), (64, 64), 0)
    seen = torch.ones(3, 400, dtype=torch.bool)
    seen[1, 100:130] = False
    seen[1, 390:] = False
    for kv in (k, v):
        kv[1, :, 100:130] = torch.nan
        kv[1, :, 390:] = torch.inf
        kv[2, :, 3] = torch.nan
    made = _attend(kernels, q, k, v, seen=seen)
    assert made[:2].isfinite().all()
    assert made[2].isnan().all()
    for row in range(2):
        kept = [one[row : row + 1, :, seen[row]] for one in (k, v)]
        assert torch.equal(_attend(kernels, q[row : row + 1], *kept)[0], made[row])


@compiled
@every
def test_scores_that_are_not_seen_count_for_nothing_however_large(kernels: Library) -> None:
    q, k, v = _given((1, 1, 1, 12, 12, 0), (32, 32), 0)
    q[0, 0, :, 0] = 40
    k[0, 0, :, 0] = torch.arange(12) * 30.0
    spans = torch.stack([torch.arange(12) // 2, torch.arange(12) + 1], 1).int()
    place = torch.arange(12)
    mask = (spans[:, :1] <= place) & (place < spans[:, 1:])
    torch.testing.assert_close(_attend(kernels, q, k, v, spans=spans), _exact(q, k, v, mask), rtol=1e-4, atol=1e-5)


@compiled
@every
def test_who_sees_nothing_gets_nothing(kernels: Library) -> None:
    q, k, v = _given((2, 1, 2, 7, 300, 0), (16, 16), 0)
    seen = torch.ones(2, 300, dtype=torch.bool)
    seen[1] = False
    made = _attend(kernels, q, k, v, seen=seen)
    assert (made[1] == 0).all()
    torch.testing.assert_close(made[0], _exact(q, k, v, None)[0], rtol=1e-4, atol=2e-6)
    assert _attend(kernels, q[:0], k[:0], v[:0]).shape == (0, 2, 7, 16)
    assert (_attend(kernels, q, k[:, :, :0], v[:, :, :0]) == 0).all()


@compiled
@every
def test_extreme_scores(kernels: Library) -> None:
    q, k, v = _given((1, 1, 1, 9, 300, 0), (16, 16), 0)
    for factor in (1e-4, 300.0, 3e4):
        torch.testing.assert_close(
            _attend(kernels, q * factor, k, v), _exact(q * factor, k, v, None), rtol=1e-3, atol=1e-4
        )
    k[0, 0, 5] = torch.inf
    assert _attend(kernels, q, k, v).isnan().all()


@pytest.mark.parametrize(
    "kind", ["plain", "padding", "causal", "additive", "double", "gradient", "half", "few", "wide"]
)
def test_every_kind_of_call_is_answered(kind: str) -> None:
    queries, keys, dim = (5 if kind == "few" else 40), 33, (300 if kind == "wide" else 24)
    q, k, v = _given((2, 3, 1, queries, keys, 0), (dim, dim), 0)
    mask = None
    if kind == "padding":
        mask = torch.arange(keys)[None, None, None] < torch.tensor([keys, 21])[:, None, None, None]
    if kind == "causal":
        mask = torch.ones(queries, keys, dtype=torch.bool).tril()
    if kind == "additive":
        mask = torch.randn(2, 1, 1, keys)
    if kind in ("double", "half"):
        q, k, v = (one.to(torch.double if kind == "double" else torch.bfloat16) for one in (q, k, v))
    if kind == "gradient":
        q.requires_grad_()
    made = full_attention(q, k, v, mask)
    torch.testing.assert_close(made, scaled_dot_product_attention(q, k, v, attn_mask=mask), rtol=1e-4, atol=2e-6)
    assert made.requires_grad == (kind == "gradient")


class _Layer(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **said: Any) -> torch.Tensor:
        own = hidden_states.unflatten(2, (3, -1)).transpose(1, 2)
        return scaled_dot_product_attention(own, own, own, **said)


def test_torchs_attention_is_compiled_within_a_module_and_nowhere_else() -> None:
    x = torch.randn(2, 200, 3 * 64)
    own = x.unflatten(2, (3, -1)).transpose(1, 2)
    layer, plain = _Layer(), _Layer()
    compile_attention([layer])
    wanted = full_attention(own, own, own)
    assert torch.equal(plain(x), wanted) == (not libraries())
    assert torch.equal(layer(x), wanted)
    assert torch.equal(layer(hidden_states=x), wanted)
    with pytest.raises(RuntimeError):
        layer(x, attn_mask=torch.ones(3, 5))
    assert torch.equal(plain(x), scaled_dot_product_attention(own, own, own)), "it is left behind an error, too"
    for said in ({"is_causal": True}, {"enable_gqa": True}, {"attn_mask": torch.ones(200, 200).tril() == 1}):
        assert torch.equal(layer(x, **said), plain(x, **said)), said
    assert torch.equal(layer(x[:, :40]), plain(x[:, :40])), "a small call"
