"""Rows that follow a cached prefix attend as if they were written behind it, and nothing is written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.paged_attention import ReferenceAttention
from segue.kernels.attention.paged_step import Part, paged_step
from segue.kernels.attention.prefix_attention import PrefixBlock, PrefixStep
from segue.kernels.kv.layout import uniform
from segue.kernels.kv.store import KVStore
from segue.messages.errors import ConfigError

SIZE, DIM, HEADS, KV_HEADS = 4, 8, 4, 2
CPU = torch.device("cpu")
FORM = AttentionOptions(0.3)


def store_of(blocks: int, stored: torch.dtype | None = None) -> KVStore:
    store = KVStore(
        uniform(1, KV_HEADS, DIM), num_blocks=blocks, block_size=SIZE, dtype=torch.float32, device=CPU, stored=stored
    )
    draw = torch.Generator().manual_seed(1)
    for layer in (*store.keys, *store.values):
        layer.copy_(torch.randn(layer.shape, generator=draw))
    return store


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 17), st.integers(2, 9)), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([None, torch.float8_e4m3fn]),
)
def test_as_if_written_behind_the_prefix(
    wanted: list[tuple[int, int]], scattered: bool, stored: torch.dtype | None
) -> None:
    """`wanted`: for each block of rows (tokens of its prefix, its rows)."""
    needed = [-(-(length + count) // SIZE) for length, count in wanted]
    order = torch.randperm(sum(needed)).tolist() if scattered else list(range(sum(needed)))
    tables = [[order.pop(0) for _ in range(count)] for count in needed]
    store = store_of(sum(needed), stored)
    tokens = sum(count for _, count in wanted)
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(heads, tokens, DIM, generator=draw) for heads in (HEADS, KV_HEADS, KV_HEADS))
    if stored is not None:  # the reference writes these rows, and so rounds them
        k, v = store.as_kept(k), store.as_kept(v)
    rows, parts, begin = [], [], 0
    for (length, count), table in zip(wanted, tables, strict=True):
        rows.append(PrefixBlock(begin, begin + count, table, length))
        parts.append(Part(table, length, length + count, [(length, length + count)]))
        begin += count
    before = [layer.clone() for layer in (*store.keys, *store.values)]
    made = PrefixStep(store, rows).attend(0, q, k, v, FORM)
    assert all(torch.equal(one, layer) for one, layer in zip(before, (*store.keys, *store.values), strict=True))
    expected = ReferenceAttention().attend(0, q, k, v, paged_step(store, parts), FORM)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_what_it_does_not_support_is_refused() -> None:
    q = torch.zeros(HEADS, 2, DIM)
    step = PrefixStep(store_of(1), [PrefixBlock(0, 2, [0], 1)])
    for form in (AttentionOptions(0.3, window=3), AttentionOptions(0.3, softcap=1.0)):
        with pytest.raises(ConfigError, match="neither windows nor soft caps"):
            step.attend(0, q, q[:KV_HEADS], q[:KV_HEADS], form)
