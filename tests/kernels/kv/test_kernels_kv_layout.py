"""Layers in groups: everyone has a place of its own, little lies idle, and unequal layers share blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue.kernels.attention.paged_attention import AttentionOptions, ReferenceAttention, TorchAttention
from segue.kernels.attention.paged_step import Part, paged_step
from segue.kernels.kv.layout import LayerShape, lay_out, uniform
from segue.kernels.kv.store import KVStore

SHAPE = LayerShape(2, 8, 8)


@given(st.lists(st.sampled_from([None, 4, 1024]), min_size=1, max_size=70))
def test_every_layer_has_a_place_of_its_own(windows):
    layout = lay_out([SHAPE] * len(windows), windows)
    places = list(zip(layout.group_of, layout.tensor_of, strict=True))
    assert len(set(places)) == len(windows)
    assert [layout.windows[group] for group in layout.group_of] == windows
    assert set(layout.group_of) == set(range(layout.groups))
    assert layout.tensors * layout.groups - len(windows) <= layout.tensors * layout.groups / 8
    assert layout.windows[0] is None or None not in windows


@pytest.mark.parametrize(
    ("full", "windowed", "groups", "tensors"),
    [
        (28, 0, 1, 28),  # Qwen 2
        (0, 32, 1, 32),  # Mistral
        (13, 13, 2, 13),  # Gemma 2, 2B
        (12, 12, 2, 12),  # GPT-OSS 20B
        (4, 22, 7, 4),  # Gemma 3, 1B
        (10, 52, 5, 13),  # Gemma 3, 27B
    ],
)
def test_groups_of_known_models(full, windowed, groups, tensors):
    layout = lay_out([SHAPE] * (full + windowed), [None] * full + [512] * windowed)
    assert (layout.groups, layout.tensors) == (groups, tensors)


@given(st.permutations(range(6)), st.integers(0, 1000))
def test_unequal_layers_share_tensors_without_touching_each_other(blocks, seed):
    """A wide layer with few heads and a narrow one with many; values narrower than keys."""
    shapes = [LayerShape(1, 16, 12), LayerShape(4, 2, 2)]
    layout = lay_out(shapes, [None, 5])
    assert (layout.tensors, layout.widths(0)) == (1, (16, 12))
    store = KVStore(layout, num_blocks=6, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    written = []
    for layer, shape in enumerate(shapes):
        own = torch.tensor(blocks[3 * layer : 3 * layer + 3])
        slots = (own[:, None] * 4 + torch.arange(4)).flatten()
        keys = torch.randn(12, shape.kv_heads, shape.head_dim, generator=generator)
        values = torch.randn(12, shape.kv_heads, shape.value_dim, generator=generator)
        store.write(layer, slots, keys, values)
        written.append((own, keys, values))
    for layer, (own, keys, values) in enumerate(written):
        found = store.read(layer, own, 1)
        assert torch.equal(found[0][0].transpose(0, 1), keys)
        assert torch.equal(found[1][0].transpose(0, 1), values)


@pytest.mark.parametrize(
    "form", [AttentionOptions(0.3), AttentionOptions(0.3, window=3), AttentionOptions(0.3, softcap=5.0)]
)
def test_values_of_another_width_than_keys(form):
    generator = torch.Generator().manual_seed(0)
    layout = lay_out([LayerShape(2, 8, 6)], [None])
    parts = [Part([4], 3, 4), Part([1, 2], 5, 6), Part([0], 0, 3), Part([5, 3], 2, 7)]
    q, k, v = (torch.randn(heads, 10, dim, generator=generator) for heads, dim in ((4, 8), (2, 8), (2, 6)))
    out = []
    for backend in (TorchAttention(), ReferenceAttention()):
        store = KVStore(layout, num_blocks=6, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
        out.append(backend.attend(0, q, k, v, paged_step(store, parts), form))
    assert out[0].shape == (10, 4, 6)
    torch.testing.assert_close(out[0], out[1], rtol=1e-4, atol=1e-5)


def test_one_group_of_equal_layers_is_dense():
    store = KVStore(uniform(2, 2, 8), num_blocks=3, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    assert all(layer.is_contiguous() and layer.shape == (3, 4, 2, 8) for layer in store.keys + store.values)
