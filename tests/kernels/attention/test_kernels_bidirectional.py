"""Tokens that see each other in both directions: every backend that does them against the reference."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from segue.kernels.attention.backends.flex import FlexAttention
from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.paged_attention import ReferenceAttention, TorchAttention
from segue.kernels.attention.paged_step import AttentionBackend, Part, paged_step, step_order
from segue.kernels.kv.layout import uniform
from segue.kernels.kv.store import KVStore

pytestmark = pytest.mark.slow

SIZE, DIM, BLOCKS = 4, 8, 80
CPU = torch.device("cpu")

chunks = st.lists(st.tuples(st.integers(0, 3), st.integers(2, 7)), max_size=3)
"""Of one sequence: (text before it, its length) of every span in the part that is computed."""
sequences = st.lists(st.tuples(st.integers(0, 20), chunks, st.integers(1, 4)), min_size=1, max_size=4)


def parts_of(wanted: list[tuple[int, list[tuple[int, int]], int]]) -> list[Part]:
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    parts = []
    for start, spans, rest in wanted:
        place, bidirectional = start, []
        for gap, length in spans:
            first = place + gap + bool(bidirectional and not gap)
            bidirectional.append((first, first + length))
            place = first + length
        stop = place + rest
        parts.append(Part([order.pop() for _ in range(-(-stop // SIZE))], start, stop, bidirectional))
    return sorted(parts, key=step_order)


def attended(backend: AttentionBackend, parts: list[Part], window: int | None, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    store = KVStore(uniform(1, 2, DIM), num_blocks=BLOCKS, block_size=SIZE, dtype=torch.float32, device=CPU)
    for layer in (*store.keys, *store.values):
        layer.copy_(torch.randn(layer.shape, generator=draw))
    tokens = sum(part.stop - part.start for part in parts)
    q, k, v = (torch.randn(heads, tokens, DIM, generator=draw) for heads in (4, 2, 2))
    return backend.attend(0, q, k, v, paged_step(store, parts), AttentionOptions(0.3, window))


def check(backend: AttentionBackend, wanted: list[tuple[int, list[tuple[int, int]], int]], window: int | None) -> None:
    parts = parts_of(wanted)
    expected = attended(ReferenceAttention(), parts, window, 1)
    torch.testing.assert_close(attended(backend, parts, window, 1), expected, rtol=1e-4, atol=1e-5)


windows = st.sampled_from([None, None, 1, 3, 6, 50])


@settings(max_examples=80, deadline=None)
@given(sequences, windows, st.sampled_from([0, 10**9]))
def test_gathered_or_in_place(wanted, window, span_bytes):
    check(TorchAttention(span_bytes), wanted, window)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=15, deadline=None)
@given(sequences, windows)
def test_flex(wanted, window):
    check(FlexAttention(flex_attention), wanted, window)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("window", [None, 6])
def test_triton(window):
    from segue.kernels.attention.backends.triton import TritonAttention

    wanted = [(7, [(2, 6), (1, 3)], 2), (0, [(60, 12)], 4), (9, [], 1), (5, [], 5)]
    check(TritonAttention(CPU), wanted, window)


def test_what_a_span_sees_counts() -> None:
    """The reference itself: a mask written out."""
    [part] = parts_of([(3, [(1, 4)], 2)])
    assert part.bidirectional == [(4, 8)]
    assert part.reaches().tolist() == [4, 8, 8, 8, 8, 9, 10]
    assert not part.causal
    both = attended(ReferenceAttention(), [part], None, 1)
    causal = attended(ReferenceAttention(), [part._replace(bidirectional=())], None, 1)
    differ = (both - causal).abs().amax(dim=(1, 2)) > 1e-3
    assert differ.tolist() == [False, True, True, True, False, False, False]
