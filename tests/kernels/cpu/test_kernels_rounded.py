"""GEMMs whose activations are rounded, with every instruction set of this CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from segue.kernels.cpu.native import BYTES, ROUNDED, Library, libraries
from segue.kernels.cpu.panels import in_panels
from segue.kernels.cpu.rounded_linear import RoundedLinear, words_of
from segue.kernels.linear.quantized import eight_bits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU"),
]
every = pytest.mark.parametrize("kernels", libraries(), ids=lambda kernels: f"set {kernels.number}")
kinds = pytest.mark.parametrize("kind", [ROUNDED, BYTES], ids=["bfloat16", "int8"])


def product(
    kernels: Library, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, kind: int, *, gelu: bool = False
) -> torch.Tensor:
    rows, inputs = x.shape
    panels, on = in_panels(words_of(weight, kind), bias, kernels.panel)
    y = torch.full((rows, len(weight)), torch.nan)
    scratch = torch.full((kernels.product_scratch(kernels.number, kind, rows, inputs),), torch.nan)
    kernels.product(
        *(kernels.number, x.data_ptr(), rows, inputs, panels.data_ptr(), kind, on.data_ptr(), y.data_ptr()),
        *(len(weight), gelu, scratch.data_ptr(), 0, 2),
    )
    return y


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, kind: int) -> torch.Tensor:
    """With the same roundings, in float64."""
    if kind == ROUNDED:
        return x.bfloat16().double() @ weight.bfloat16().double().T + bias
    whole, scale = eight_bits(weight)
    largest = x.abs().amax(1, keepdim=True)
    by = torch.tensor(127.0).div(largest)
    numbers = (x.double() * by.double()).round().nan_to_num(0)
    return (numbers @ whole.double().T) * scale * (largest / 127) + bias


@every
@kinds
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 200), st.integers(0, 99))
def test_what_is_rounded_is_summed_exactly(
    kernels: Library, kind: int, rows: int, steps: int, outputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 32 * steps, generator=generator) * 10.0 ** torch.randint(-6, 7, (), generator=generator)
    weight = torch.randn(outputs, 32 * steps, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    made = product(kernels, x, weight, bias, kind)
    wanted = exact(x, weight, bias, kind)
    size = x.abs().double() @ weight.abs().double().T + bias.abs()
    assert ((made - wanted).abs() / size).max() < 2e-6
    row = seed % rows
    alone = product(kernels, x[row : row + 1].clone(), weight, bias, kind)
    assert torch.equal(alone[0], made[row]), "others change a row"


@every
@kinds
def test_rows_that_are_special(kernels: Library, kind: int) -> None:
    x, weight, bias = torch.randn(9, 64), torch.randn(96, 64), torch.randn(96)
    x[1], x[2, 3], x[3, 4], x[4] = 0, torch.nan, torch.inf, x[4] * 1e-33
    made = product(kernels, x, weight, bias, kind)
    torch.testing.assert_close(made[1], bias)
    torch.testing.assert_close(made[4], bias)
    assert not made[2:4].isfinite().any()
    others = [0, 5, 6, 7, 8]
    torch.testing.assert_close(made[others], exact(x, weight, bias, kind)[others].float(), rtol=1e-2, atol=1e-2)


@every
@kinds
def test_gelu_behind_a_product(kernels: Library, kind: int) -> None:
    x, weight, bias = torch.randn(21, 64), torch.randn(100, 64) / 8, torch.randn(100)
    plain = product(kernels, x, weight, bias, kind)
    made = product(kernels, x, weight, bias, kind, gelu=True)
    torch.testing.assert_close(made, functional.gelu(plain, approximate="tanh"), rtol=1e-5, atol=1e-5)


def test_all_sets_give_the_same() -> None:
    x, weight, bias = torch.randn(33, 320), torch.randn(120, 320), torch.randn(120)
    of_bytes, of_halves = (
        [product(kernels, x, weight, bias, kind) for kernels in libraries()] for kind in (BYTES, ROUNDED)
    )
    for made in (of_bytes, of_halves):
        for other in made[1:]:
            torch.testing.assert_close(other, made[0], rtol=1e-5, atol=1e-4)


@kinds
def test_compiled_code_calls_them(kind: int) -> None:
    layer = RoundedLinear(torch.randn(96, 64), None, kind)
    x = torch.randn(2, 7, 64)
    with torch.inference_mode():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(compiled, layer(x))
