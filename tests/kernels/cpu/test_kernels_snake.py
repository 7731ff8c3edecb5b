"""Snake activations in one pass, for every kind of vectors that this CPU has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue.kernels.cpu.native import Library, libraries, library
from segue.kernels.cpu.recorder import record
from segue.kernels.cpu.snake import snake
from segue.kernels.operations import snake as on_any_device

compiled = pytest.mark.skipif(library() is None, reason="no compiled kernels")


@compiled
@pytest.mark.parametrize("kernels", libraries(), ids=lambda kernels: f"set {kernels.number}")
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 70)), seed=st.integers(0, 1 << 30))
def test_equals_what_torch_computes(kernels: Library, shape: tuple[int, int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, channels, samples = shape
    # a view, as a layer gets it; angles up to some thousands
    x = (torch.randn(batch, channels, samples + 3, generator=generator) * 30)[..., 3:]
    frequencies, shares = (torch.randn(2, channels, generator=generator) * 2).exp()
    exact = x.double() + (x.double() * frequencies.double()[:, None]).sin().square() * shares.double()[:, None]
    found = snake(x, frequencies, shares, kernels)
    # the product of a sample and a frequency is rounded, too: an angle of 1,000 is off by 6e-5
    off = 1e-6 + (x.double() * frequencies.double()[:, None]).abs() * 2e-7
    assert ((found - exact).abs() <= off * shares[:, None] + 1e-6 * exact.abs() + 1e-6).all()
    assert torch.equal(found[:1], snake(x[:1], frequencies, shares, kernels))


@compiled
def test_other_dtypes_and_replays() -> None:
    kernels = library()
    assert kernels is not None
    x, frequencies, shares = torch.randn(2, 3, 40), torch.rand(3) + 0.5, torch.rand(3)
    expected = on_any_device(x.double(), frequencies.double(), shares.double())
    torch.testing.assert_close(on_any_device(x, frequencies, shares).double(), expected, rtol=1e-5, atol=1e-5)
    replay, _ = record(kernels, lambda: on_any_device(x, frequencies, shares))
    x.mul_(-2)
    replay()
    assert torch.equal(replay.result, on_any_device(x, frequencies, shares))
    assert on_any_device(x[..., :0], frequencies, shares).shape == (2, 3, 0)
    broken = torch.tensor([[[1.0, float("nan"), float("inf")]]])
    assert on_any_device(broken, frequencies[:1], shares[:1]).isnan()[0, 0].tolist() == [False, True, True]
