"""Layers that attend in chunks: parts cut at the borders give, with every backend, attention under a chunked mask."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from segue.kernels.attention.backends.flex import FlexAttention
from segue.kernels.attention.interface import AttentionOptions, Chunked, check_chunks, first_seen
from segue.kernels.attention.paged_attention import ReferenceAttention, TorchAttention, dense_attention
from segue.kernels.attention.paged_step import (
    AttentionBackend,
    Part,
    additive,
    leading_singles,
    paged_step,
    step_order,
    within_chunks,
)
from segue.kernels.cpu.native import library
from segue.kernels.cpu.native_attention import NativeAttention
from segue.kernels.kv.layout import lay_out, uniform
from segue.kernels.kv.store import KVStore
from segue.messages.errors import ConfigError

pytestmark = pytest.mark.slow

SIZE, DIM, BLOCKS = 4, 8, 90
CPU = torch.device("cpu")
sequences = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=4)
"""(tokens before, tokens of the step) of each."""


def check(backend: AttentionBackend, wanted: list[tuple[int, int]], size: int, behind: int) -> None:
    """`behind`: as many blocks as can be were given back, up to this many."""
    back = Chunked(size)
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    whole = []
    for start, tokens in wanted:
        stop = start + tokens
        whole.append(Part([order.pop() for _ in range(-(-stop // SIZE))], start, stop))
    whole.sort(key=step_order)
    cut = []
    for part in whole:
        given_back = min(behind, first_seen(back, part.start) // SIZE)
        before = given_back * SIZE
        held = Part(part.blocks[given_back:], part.start - before, part.stop - before)
        cut += within_chunks(held, back, before, SIZE)
    draw = torch.Generator().manual_seed(1)
    store = KVStore(uniform(1, 2, DIM), num_blocks=BLOCKS, block_size=SIZE, dtype=torch.float32, device=CPU)
    for layer in (*store.keys, *store.values):
        layer.copy_(torch.randn(layer.shape, generator=draw))
    tokens = sum(part.stop - part.start for part in whole)
    q, k, v = (torch.randn(heads, tokens, DIM, generator=draw) for heads in (4, 2, 2))
    form = AttentionOptions(0.3)
    ours = backend.attend(0, q, k, v, paged_step(store, cut), form)
    begin = 0
    for part in whole:
        end = begin + part.stop - part.start
        keys, values = (kv[0, :, : part.stop] for kv in store.read(0, torch.tensor(part.blocks), 1))
        place = torch.arange(part.stop)
        query = place[part.start :, None]
        mask = additive((place <= query) & (place // size == query // size), torch.float32)
        expected = dense_attention(q[:, begin:end], keys, values, mask, form).transpose(0, 1)
        torch.testing.assert_close(ours[begin:end], expected, rtol=1e-4, atol=1e-5)
        begin = end


sizes = st.sampled_from([4, 8, 16, 100])


@settings(max_examples=80, deadline=None)
@given(sequences, sizes, st.integers(0, 9), st.sampled_from([0, 10**9]))
def test_gathered_or_in_place(wanted, size, behind, span_bytes):
    check(TorchAttention(span_bytes), wanted, size, behind)


@settings(max_examples=40, deadline=None)
@given(sequences, sizes, st.integers(0, 9))
def test_the_reference(wanted, size, behind):
    check(ReferenceAttention(), wanted, size, behind)


@pytest.mark.skipif(library() is None, reason="no compiled kernels here")
@settings(max_examples=80, deadline=None)
@given(sequences, sizes, st.integers(0, 9))
def test_compiled_kernels(wanted, size, behind):
    compiled = library()
    assert compiled is not None
    check(NativeAttention(compiled), wanted, size, behind)


FIXED = [(7, 12), (0, 1), (31, 2), (39, 1), (0, 20)]
"""A border within a part, single queries, one of them behind a border."""


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("behind", [0, 9])
def test_flex(behind):
    check(FlexAttention(flex_attention), FIXED, 8, behind)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("behind", [0, 9])
def test_triton(behind):
    from segue.kernels.attention.backends.triton import TritonAttention

    check(TritonAttention(CPU), FIXED, 8, behind)


def test_a_part_is_cut_at_the_borders() -> None:
    """Blocks of 4, chunks of 8, the first two blocks given back: positions 13 to 25 in three pieces."""
    pieces = within_chunks(Part([7, 5, 3, 1, 0], 5, 17), Chunked(8), 8, 4)
    assert pieces == [Part([7, 5, 3, 1, 0], 5, 8), Part([3, 1, 0], 0, 8), Part([0], 0, 1)]
    assert leading_singles(pieces) == 0
    part = Part([1, 2], 3, 8)
    assert within_chunks(part, None, 0, 4) == within_chunks(part, 3, 0, 4) == [part]


def test_borders_are_those_of_blocks() -> None:
    check_chunks([None, 5, Chunked(32)], 16)
    with pytest.raises(ConfigError, match="block_size is 16, but layers of this model attend in chunks of 24 tokens"):
        check_chunks([None, Chunked(24)], 16)


def test_chunks_are_groups_of_their_own() -> None:
    layout = lay_out(uniform(4, 2, 8).shapes, [Chunked(8), None, 8, Chunked(16)])
    assert layout.windows == (None, 8, Chunked(8), Chunked(16))
    assert layout.group_of == (2, 0, 1, 3)
