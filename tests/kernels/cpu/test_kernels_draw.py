"""Codes drawn in one pass are those that torch's operators draw, which other dtypes take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue.kernels.cpu.native import library
from segue.kernels.cpu.recorder import record
from segue.kernels.operations import draw_codes

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels")


@given(
    rows=st.integers(1, 9),
    width=st.sampled_from([1, 2, 7, 64, 2048]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 50, 4000]),
    top_p=st.sampled_from([0.0123, 0.4871, 0.8129, 1.0]),
    levels=st.sampled_from([0, 3, 40]),
    seed=st.integers(0, 1 << 30),
)
def test_the_codes_are_those_of_torch(rows, width, temperature, top_k, top_p, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    # views of larger tensors, as a step has them; with few levels many codes are equally likely
    logits = (torch.randn(rows, 2 * width, generator=generator) * 4)[:, :width]
    if levels:
        logits = (logits * levels).round() / levels
    numbers = torch.rand(rows, 3, dtype=torch.float64, generator=generator)[:, 1]
    greedy = torch.rand(rows, generator=generator) < 0.3
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    mine, finite = draw_codes(logits, numbers, greedy, **options)
    theirs, _ = draw_codes(logits.double(), numbers, greedy, **options)
    assert finite.all()
    # where a number is at the border of two codes, rounding decides: numbers next to it draw either
    near = [(numbers + by).clamp(0, 1 - 1e-9) for by in (-1e-5, 1e-5)]
    others = [draw_codes(logits.double(), moved, greedy, **options)[0] for moved in near]
    assert ((mine == theirs) | (mine == others[0]) | (mine == others[1])).all()


def test_rows_that_are_no_numbers_are_told_and_harm_no_other():
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(1))
    numbers, options = torch.full((5,), 0.4).double(), {"temperature": 1.0, "top_k": 3, "top_p": 0.9}
    clean, _ = draw_codes(logits, numbers, torch.zeros(5).bool(), **options)
    logits[0, 4], logits[1, 7], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, 5:] = float("-inf")
    for greedy in (False, True):
        codes, finite = draw_codes(logits, numbers, torch.full((5,), greedy), **options)
        assert finite.tolist() == [False, False, False, True, True]
        assert ((codes >= 0) & (codes < 33)).all()
        assert codes[3] < 5
        assert codes[4] == (logits[4].argmax() if greedy else clean[4])


def test_a_replay_draws_by_the_numbers_and_logits_of_its_time():
    compiled = library()
    assert compiled is not None
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(8, 300, generator=generator)
    x, numbers = torch.randn(4, 8, generator=generator), torch.rand(4, 2, dtype=torch.float64, generator=generator)
    greedy = torch.tensor([False, True, False, False])

    def drawn() -> list[torch.Tensor]:
        return [*draw_codes(x @ weight, numbers[:, 1], greedy, temperature=0.9, top_k=40, top_p=0.8)]

    replay, first = record(compiled, drawn)
    seen = {tuple(first[0].tolist())}
    for _ in range(5):
        x.copy_(torch.randn(4, 8, generator=generator))
        numbers.copy_(torch.rand(4, 2, dtype=torch.float64, generator=generator))
        greedy.copy_(greedy.roll(1))
        expected = drawn()
        replay()
        assert all(map(torch.equal, replay.result, expected))
        seen.add(tuple(expected[0].tolist()))
    assert len(seen) == 6
