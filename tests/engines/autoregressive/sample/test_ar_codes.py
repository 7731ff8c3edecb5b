"""The draws of a row's further codes: the library's distribution, and the row's own whatever is next to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from segue.engines.autoregressive.contract import Draws
from segue.engines.autoregressive.sample.codes import draw_heads
from segue.engines.autoregressive.sample.sampler import code_uniforms, uniforms
from segue.kernels.operations import draw_codes

VOCAB = 41


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 200])
@pytest.mark.parametrize("top_p", [0.3, 0.8, 1.0])
def test_the_distribution_is_the_librarys(temperature, top_k, top_p):
    """As numbers sweep [0, 1), each code is drawn as often as the library's warpers say."""
    one, count = logits(1, seed=3), 4000
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn, finite = draw_codes(
        one.expand(count, -1),
        numbers,
        torch.zeros(count, dtype=torch.bool),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    steps = [
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(top_k) if top_k else None,
        TopPLogitsWarper(top_p) if top_p < 1 else None,
    ]
    expected = LogitsProcessorList([step for step in steps if step])(torch.empty(1, 0), one.clone())[0].softmax(-1)
    found = torch.bincount(drawn, minlength=VOCAB) / count
    assert finite.all()
    assert ((found > 0) <= (expected > 0)).all()
    torch.testing.assert_close(found, expected, rtol=0, atol=1.0 / count)


def test_a_row_draws_the_same_next_to_others():
    many, numbers = logits(64, seed=5), torch.rand(64, dtype=torch.float64)
    greedy = torch.arange(64) % 3 == 0
    options = {"temperature": 1.0, "top_k": 9, "top_p": 0.8}
    together, _ = draw_codes(many, numbers, greedy, **options)
    alone = [int(draw_codes(many[i : i + 1], numbers[i : i + 1], greedy[i : i + 1], **options)[0]) for i in range(64)]
    assert together.tolist() == alone
    assert torch.equal(together[greedy], many[greedy].argmax(-1))
    assert not torch.equal(together, many.argmax(-1))


def test_ties_of_the_last_kept_code_are_kept():
    flat = torch.zeros(1000, 5)
    flat[:, 0] = 1.0
    numbers = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn, _ = draw_codes(flat, numbers, torch.zeros(1000, dtype=torch.bool), temperature=1.0, top_k=2, top_p=1.0)
    assert set(drawn.tolist()) == {0, 1, 2, 3, 4}


def test_nan_is_told_of_its_row_alone():
    two = logits(2)
    two[1, 4] = torch.nan
    filters = torch.ones(2, 3, dtype=torch.float64)
    draws = Draws(torch.full((2, 3), 0.5, dtype=torch.float64), filters[:, 0] == 0.0, filters)
    codes = draws.code(1, two, top_k=4, top_p=0.8)
    assert 0 <= int(codes.min()) <= int(codes.max()) < VOCAB
    draws.code(2, logits(2), top_k=4)
    assert draws.finite is not None
    assert draws.finite.tolist() == [True, False]


def test_numbers_are_those_of_their_place():
    """However many are computed at once; none is a number of code 0, and none comes twice."""
    whole = code_uniforms(7, 0, 40, 15)
    assert np.array_equal(whole[13:20], code_uniforms(7, 13, 7, 15))
    assert ((whole >= 0) & (whole < 1)).all()
    of_tokens = np.array(uniforms(7, 0, 200))
    assert len(np.unique(np.concatenate([whole.ravel(), of_tokens]))) == whole.size + len(of_tokens)
    assert not np.array_equal(whole, code_uniforms(8, 0, 40, 15))
    assert abs(whole.mean() - 0.5) < 0.05


def test_heads_draw_as_single_codes_do():
    """Each head by its own number, each row under its own filters."""
    count, heads = 24, 3
    many = logits(count * heads, seed=7).view(count, heads, VOCAB)
    numbers = torch.rand(count, heads, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    greedy = torch.arange(count) % 5 == 0
    ways = [(0.6, 0, 1.0), (1.0, 7, 1.0), (1.3, 0, 0.8), (0.9, 9, 0.7), (0.0, 5, 0.5), (1.0, 200, 1.0)]
    filters = torch.tensor([ways[row % len(ways)] for row in range(count)], dtype=torch.float64)
    drawn, finite = draw_heads(many, numbers, greedy | (filters[:, 0] == 0), filters)
    assert finite.all()
    for row in range(count):
        temperature, top_k, top_p = ways[row % len(ways)]
        alone, _ = draw_codes(
            many[row],
            numbers[row],
            (greedy[row] | (temperature == 0)).expand(heads),
            temperature=temperature or 1.0,
            top_k=top_k,
            top_p=top_p,
        )
        assert drawn[row].tolist() == alone.tolist()
    many[3, 1, 0] = torch.nan
    assert draw_heads(many, numbers, greedy, filters)[1].tolist() == [row != 3 for row in range(count)]
