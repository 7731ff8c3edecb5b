"""Paged attention against the plain reference, in every form a layer may ask for."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_stores import DIM, SIZE, compare, forms, layout, store
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface
from transformers.masking_utils import causal_mask_function

from segue.kernels.attention.backends.choose import attention_backend
from segue.kernels.attention.backends.flex import FlexAttention
from segue.kernels.attention.paged_attention import (
    NAME,
    AttentionOptions,
    TorchAttention,
    dense_attention,
    library_attention,
    paged_attention,
    paged_mask,
)
from segue.kernels.attention.paged_step import Part, additive, paged_step
from segue.kernels.attention.spans import slot_runs
from segue.messages.errors import ConfigError


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1, 1, 1, 2, 7])), min_size=1, max_size=6),
    st.sampled_from([(1, 1), (2, 1), (6, 2), (4, 4)]),
    forms,
    st.integers(0, 100),
    st.sampled_from([1, 4, 16, 64]),
    st.sampled_from([0, 100, 10**9]),
)
def test_equals_the_reference(spans, heads, form, seed, pieces, span_bytes):
    """Whether blocks are scattered or not, read in place or gathered."""
    compare("cpu", spans, heads, form, seed, pieces, span_bytes)


@given(st.permutations(range(12)), st.integers(0, 40), st.integers(1, 8))
def test_runs_of_slots_are_those_of_the_tokens(blocks, start, tokens):
    stop = min(start + tokens, len(blocks) * SIZE)
    runs = slot_runs(blocks, start, stop, SIZE)
    found = [slot for begin, end in runs for slot in range(begin, end)]
    assert found == [blocks[token // SIZE] * SIZE + token % SIZE for token in range(start, stop)]
    assert all(end != begin for (_, end), (begin, _) in pairwise(runs)), "two runs should be one"


def test_long_sequences_in_one_piece_are_read_in_place_and_others_gathered():
    own = store(2)
    whole, scattered = list(range(10)), [3, 1, 7, 30, 20, 11, 13, 15, 17, 19]
    for blocks, window, wanted in ((whole, None, [(0, 0, 38)]), (whole, 5, [(0, 33, 38)]), (scattered, None, None)):
        [group] = paged_step(own, [Part(blocks, 37, 38)]).decodes
        assert group.spans(window, SIZE, least=4 * SIZE) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("form", [(None, None, False), (3, None, False), (None, 5.0, True)])
def test_equals_the_reference_on_a_gpu(form):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    compare("cuda", [(0, 7), (3, 1), (30, 1), (9, 5)], (6, 2), form, 0)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1, 1, 1, 2, 7])), min_size=1, max_size=6),
    st.sampled_from([(1, 1), (2, 1), (6, 2), (4, 4)]),
    forms,
    st.integers(0, 100),
)
def test_flex_equals_the_reference(spans, heads, form, seed):
    compare("cpu", spans, heads, form, seed, backend=FlexAttention(flex_attention))


@pytest.mark.gpu
@pytest.mark.parametrize("form", [(None, None, False), (3, None, False), (None, 5.0, True)])
def test_compiled_flex_equals_the_reference_on_a_gpu(form):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    backend = attention_backend("flex", torch.device("cuda"), 128)
    for spans in ([(0, 7), (3, 1), (300, 1), (9, 150)], [(200, 1)] * 5):
        compare("cuda", spans, (6, 2), form, 0, backend=backend, size=128, dim=64)


def test_flex_is_for_gpus_and_large_blocks():
    with pytest.raises(ConfigError, match="'flex', which needs a GPU"):
        attention_backend("flex", torch.device("cpu"), 128)
    with pytest.raises(ConfigError, match="block_size of 16; it must be a multiple of 128"):
        attention_backend("flex", torch.device("cuda"), 16)


def test_a_sequence_in_pieces_equals_the_whole():
    """Chunk after chunk, then token by token, over a store: one dense causal attention."""
    length, own = 23, store(2)
    q = torch.randn(6, length, DIM, generator=torch.Generator().manual_seed(0))
    k, v = (torch.randn(2, length, DIM, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    whole = dense_attention(q, k, v, additive(seen, torch.float32), AttentionOptions(0.4)).transpose(0, 1)
    blocks, out = [9, 2, 40, 11, 0, 63], []
    for start, stop in ((0, 6), (6, 15), *((place, place + 1) for place in range(15, length))):
        step = paged_step(own, [Part(blocks, start, stop)])
        out.append(
            TorchAttention().attend(
                0, q[:, start:stop], k[:, start:stop], v[:, start:stop], step, AttentionOptions(0.4)
            )
        )
    torch.testing.assert_close(torch.cat(out), whole, rtol=1e-4, atol=1e-5)


def test_nan_in_anothers_block_is_never_read():
    """Shorter sequences of a padded batch read their own blocks only."""
    own = store(1)
    own.keys[0][50] = torch.nan
    own.keys[0][0] = torch.nan
    parts = layout([(0, 1), (11, 1)])
    assert all(50 not in part.blocks and 0 not in part.blocks for part in parts)
    q, k, v = torch.ones(2, 2, DIM), torch.ones(1, 2, DIM), torch.ones(1, 2, DIM)
    step = paged_step(own, parts)
    assert len(step.decodes) == 1
    assert TorchAttention().attend(0, q, k, v, step, AttentionOptions(1.0)).isfinite().all()


def test_scrubbed_blocks_are_clean():
    own = store(1)
    for layer in (*own.keys, *own.values):
        layer.fill_(torch.nan)
    own.scrub([3, 5])
    assert all(layer[[3, 5]].eq(0).all() and layer[4].isnan().all() for layer in (*own.keys, *own.values))
    own.scrub([])


# --- what transformers calls -----------------------------------------------------------------------------------------


def call(**kwargs):
    q = torch.ones(1, 2, 1, DIM)
    arguments = {"attention_mask": None, "paged": paged_step(store(2), [Part([0], 0, 1)]), **kwargs}
    return paged_attention(SimpleNamespace(layer_idx=0), q, q, q, **arguments)


def test_registered_under_its_name():
    assert AttentionInterface()[NAME] is paged_attention
    out, weights = call(position_ids=torch.zeros(1), use_cache=False, some_flag=None)
    assert out.shape == (1, 1, 2, DIM)
    assert weights is None


@pytest.mark.parametrize(
    "kwargs",
    [
        {"dropout": 0.1},
        {"is_causal": False},
        {"attention_mask": torch.zeros(1, 1, 1, 1)},
        {"position_bias": torch.zeros(1)},
        {"head_mask": torch.zeros(1)},
        {"output_attentions": True},
        {"paged": None},
    ],
)
def test_what_it_cannot_do_is_refused(kwargs):
    with pytest.raises(ConfigError):
        call(**kwargs)


def test_no_mask_but_the_librarys_own_within_its_context():
    arguments = {"batch_size": 1, "q_length": 3, "kv_length": 3, "mask_function": causal_mask_function}
    assert paged_mask(**arguments) is None
    with library_attention() as record:
        mask = paged_mask(**arguments)
        call(paged=None, attention_mask=mask[..., :1, :1], sliding_window=5)
    assert mask[0, 0].tolist() == torch.ones(3, 3, dtype=torch.bool).tril().tolist()
    assert (record.masks, record.windows) == ([causal_mask_function], {0: 5})
    assert paged_mask(**arguments) is None
