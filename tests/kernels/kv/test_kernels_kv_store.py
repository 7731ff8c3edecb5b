"""Copies of whole blocks: K, V and captured rows, in all groups of layers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.kernels.kv.layout import uniform
from segue.kernels.kv.store import KVStore

BLOCKS, SIZE = 6, 3


def filled() -> KVStore:
    """Every slot holds its own number, every layer adds its own."""
    store = KVStore(
        uniform(2, 2, 4),
        num_blocks=BLOCKS,
        block_size=SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        capture_width=5,
    )
    numbers = torch.arange(BLOCKS * SIZE, dtype=torch.float32)
    for layer in range(2):
        values = (numbers + 100 * layer)[:, None, None].expand(-1, 2, 4)
        store.write(layer, torch.arange(BLOCKS * SIZE), values, -values)
    assert store.rows is not None
    store.rows.copy_(numbers[:, None].expand(-1, 5))
    return store


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(BLOCKS)), st.lists(st.integers(0, BLOCKS - 1), max_size=BLOCKS))
def test_all_are_read_before_any_is_written(targets, sources):
    store = filled()
    pairs = list(zip(sources, targets, strict=False))
    store.copy(pairs)
    content = list(range(BLOCKS))
    for source, target in pairs:
        content[target] = source
    slots = torch.tensor([block * SIZE + offset for block in content for offset in range(SIZE)], dtype=torch.float32)
    for layer in range(2):
        keys, values = store.read(layer, torch.arange(BLOCKS), 1)
        torch.testing.assert_close(keys[0, :, :, 0], (slots + 100 * layer).expand(2, -1))
        torch.testing.assert_close(values, -keys)
    assert store.rows is not None
    torch.testing.assert_close(store.rows, slots[:, None].expand(-1, 5))
