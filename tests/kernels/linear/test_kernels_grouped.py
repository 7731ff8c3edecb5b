"""Layers with weights of 4 or 8 bits give the GEMM of the dequantised weights, with every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from segue.kernels.cpu.gated_mlp import GatedMLP, fuse_gates
from segue.kernels.cpu.grouped import fitting, kind_of, read_words, words_of
from segue.kernels.cpu.native import (
    EIGHTS,
    EIGHTS_BY_FLOATS,
    FLOATS,
    FOURS,
    FOURS_BY_FLOATS,
    Library,
    libraries,
    library,
)
from segue.kernels.cpu.panels import in_panels
from segue.kernels.cpu.recorder import record
from segue.kernels.linear.fused_linear import FusedPart, fuse, siblings
from segue.kernels.linear.grouped_linear import GroupedLinear, GroupedWeights

pytestmark = pytest.mark.slow

compiled = pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
every = pytest.mark.parametrize("kernels", libraries(), ids=lambda kernels: f"set {kernels.number}")
bits_of_numbers = pytest.mark.parametrize("bits", [4, 8])
SHARED = {4: FOURS, 8: EIGHTS}
BY_FLOATS = {4: FOURS_BY_FLOATS, 8: EIGHTS_BY_FLOATS}


def weights(outputs: int, groups: int, size: int, bits: int, seed: int = 0, *, exact: bool = True) -> GroupedWeights:
    """`exact`: scales and zeros as files have them; else any floats."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 1 << bits, (outputs, groups * size), generator=generator, dtype=torch.uint8)
    scale = torch.rand(outputs, groups, generator=generator) / 8 + 1e-3
    zero = torch.randint(0, 1 << bits, (outputs, groups), generator=generator).float()
    if exact:
        return GroupedWeights(numbers, scale.half().float(), zero)
    return GroupedWeights(numbers, scale, zero + torch.randn(outputs, groups, generator=generator))


def layer_of(given: GroupedWeights, bias: torch.Tensor | None = None, **others: object) -> GroupedLinear:
    bits = 4 if int(given.numbers.max()) < 16 else 8
    return GroupedLinear(*given, bias, **{"bits": bits, "dtype": torch.float32, **others})


def called(
    kernels: Library, x: torch.Tensor, words: torch.Tensor, bias: torch.Tensor, kind: int, group: int, gelu: bool
) -> torch.Tensor:
    panels, on = in_panels(words.view(torch.float32), bias, kernels.panel)
    y = torch.full((len(x), len(words)), torch.nan)
    kernels.product(
        *(kernels.number, x.data_ptr(), len(x), x.shape[1], panels.data_ptr(), kind, on.data_ptr(), y.data_ptr()),
        *(len(words), gelu, 0, group, 2),
    )
    return y


@compiled
@every
@bits_of_numbers
@settings(max_examples=60, deadline=None)
@given(
    *(st.integers(1, 90), st.integers(1, 200), st.sampled_from([8, 24, 32, 40, 64, 128, 600, 896])),
    *(st.integers(1, 40), st.integers(0, 99), st.booleans()),
)
def test_products_are_those_of_the_wide_weights(
    kernels: Library, bits: int, rows: int, outputs: int, group: int, groups: int, seed: int, gelu: bool
) -> None:
    """To the bit, where a scale and a zero share a word: whatever the number of rows, and so whatever is beside one."""
    groups = min(groups, max(1, 1300 // group))
    generator = torch.Generator().manual_seed(seed)
    given = weights(outputs, groups, group, bits, seed)
    x, bias = torch.randn(rows, group * groups, generator=generator), torch.randn(outputs, generator=generator)
    words = words_of(given, SHARED[bits], bits)
    made = called(kernels, x, words, bias, SHARED[bits], group, gelu)
    assert torch.equal(made, called(kernels, x, given.dequantised, bias, FLOATS, 0, gelu))
    row = seed % rows
    alone = called(kernels, x[row : row + 1].clone(), words, bias, SHARED[bits], group, gelu)
    assert torch.equal(alone[0], made[row]), "others change a row"


@compiled
@every
@bits_of_numbers
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(1, 130), st.sampled_from([8, 32, 128]), st.integers(1, 12), st.integers(0, 99))
def test_scales_and_zeros_of_any_floats(
    kernels: Library, bits: int, rows: int, outputs: int, group: int, groups: int, seed: int
) -> None:
    given = weights(outputs, groups, group, bits, seed, exact=False)
    assert kind_of(given.scale, given.zero, bits) == BY_FLOATS[bits]
    x, bias = torch.randn(rows, group * groups), torch.randn(outputs)
    words = words_of(given, BY_FLOATS[bits], bits)
    made = called(kernels, x, words, bias, BY_FLOATS[bits], group, False)
    exact = x.double() @ given.dequantised.double().T + bias
    size = x.abs().double() @ given.dequantised.abs().double().T + bias.abs()
    # what is rounded of a weight is that of its largest number times the scale
    away = x.abs().double().unflatten(1, (groups, group)).sum(-1) @ given.scale.double().T * (1 << bits)
    assert ((made - exact).abs() / (size + away)).max() < 1e-6
    row = seed % rows
    assert torch.equal(
        called(kernels, x[row : row + 1].clone(), words, bias, BY_FLOATS[bits], group, False)[0], made[row]
    )


@bits_of_numbers
@pytest.mark.parametrize("exact", [True, False])
def test_words_are_read_as_they_were_written(bits: int, exact: bool) -> None:
    given = weights(37, 3, 40, bits, exact=exact)
    if exact:  # the ends of what there is room for
        given.zero[0, :] = (1 << bits - 1) + torch.tensor([-128, 127.9375, 0.0625])
    kind = kind_of(given.scale, given.zero, bits)
    assert kind == (SHARED if exact else BY_FLOATS)[bits]
    for tensor, again in zip(given, read_words(words_of(given, kind, bits), kind, bits, 3), strict=True):
        assert torch.equal(again, tensor)


@pytest.mark.parametrize(("scale", "zero"), [(1.0, 3.03), (1.0, 136.0), (1.0, -120.5), (1.0 + 2**-12, 8.0)])
def test_what_does_not_fit_into_one_word_is_in_two(scale: float, zero: float) -> None:
    plain = torch.ones(2, 3)
    assert kind_of(plain, plain, 4) == FOURS
    scales, zeros = plain.clone(), plain.clone()
    scales[1, 2], zeros[1, 2] = scale, zero
    assert kind_of(scales, zeros, 4) == FOURS_BY_FLOATS


def test_the_nearest_scales_that_fit() -> None:
    scale = torch.rand(1000) * 10.0 ** torch.randint(-20, 20, (1000,))
    near = fitting(scale)
    assert kind_of(near[None], torch.zeros(1, 1000), 4) == FOURS
    assert ((near - scale).abs() / scale).max() <= 2**-12
    assert torch.equal(fitting(near), near)


@bits_of_numbers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [4, 32, 96])
@pytest.mark.parametrize("ordered", [False, True])
def test_layers(bits: int, dtype: torch.dtype, group: int, ordered: bool) -> None:
    given = weights(70, 96 // group, group, bits)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1)) if ordered else None
    bias = torch.randn(70).to(dtype)
    layer = layer_of(given, bias, order=order, dtype=dtype)
    wide = given.dequantised if order is None else given.dequantised[:, order.argsort()]
    rough = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(layer.weight, wide.to(dtype), rtol=rough, atol=0)
    x = torch.randn(2, 5, 96).to(dtype)
    y = layer(x)
    assert (y.dtype, y.shape) == (dtype, (2, 5, 70))
    expected = functional.linear(x.float(), wide, bias.float())
    torch.testing.assert_close(y.float(), expected, rtol=rough, atol=rough * 10)
    none = layer_of(given, None, order=order, dtype=dtype)
    torch.testing.assert_close(none(x).float() + bias.float(), y.float(), rtol=rough, atol=rough * 10)


@compiled
def test_numbers_take_as_many_bits_as_they_have() -> None:
    def held(layer: nn.Module) -> int:
        return sum(tensor.nbytes for tensor in layer.buffers())

    bias = 96 * 4
    assert held(layer_of(weights(96, 4, 32, 4))) - bias == 96 * 128 // 2 + 96 * 4 * 4
    assert held(layer_of(weights(96, 4, 32, 4, exact=False))) - bias == 96 * 128 // 2 + 96 * 4 * 8
    assert held(layer_of(weights(96, 1, 128, 8))) - bias == 96 * 128 + 96 * 4


@compiled
@pytest.mark.parametrize("ordered", [False, True])
def test_compiled_code_calls_them(ordered: bool) -> None:
    layer = layer_of(weights(96, 2, 32, 4), order=torch.randperm(64) if ordered else None)
    x = torch.randn(2, 7, 64)
    with torch.inference_mode():
        made = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(made, layer(x))


@compiled
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_recordings_give_the_same(rows: int) -> None:
    down = layer_of(weights(64, 3, 32, 8), torch.randn(64), order=torch.randperm(96))
    up = layer_of(weights(96, 1, 64, 4))
    x = torch.randn(1, rows, 64)

    def run() -> torch.Tensor:
        return x + down(up(x) * 2)

    with torch.inference_mode():
        recording, _ = record(library(), run)
        for _ in range(2):
            x.normal_()
            expected = run().clone()
            recording.result.fill_(torch.nan)
            recording()
            assert torch.equal(recording.result, expected)
    assert recording.calls[0] >= 4


class Gated(nn.Module):
    def __init__(self, orders: list[torch.Tensor | None], bits: list[int]) -> None:
        super().__init__()
        self.gate, self.up = (
            layer_of(weights(96, 2, 32, bits[number], number), order=orders[number]) for number in range(2)
        )
        self.down = layer_of(weights(64, 3, 32, 4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


@torch.inference_mode()
def test_layers_with_the_same_input_become_one() -> None:
    order, other = torch.randperm(64), torch.arange(64)
    cases = [
        ([None, None], [4, 4], True),
        ([order, order.clone()], [4, 4], True),
        ([order, other], [4, 4], False),
        ([order, None], [4, 4], False),
        ([None, None], [4, 8], False),
    ]
    for orders, bits, one in cases:
        net = nn.Sequential(Gated(orders, bits))
        x = torch.randn(1, 3, 64)
        with siblings(net) as found:
            expected = net(x)
        assert fuse(net, found) == one
        assert any(isinstance(module, FusedPart) for module in net.modules()) == one
        torch.testing.assert_close(net(x), expected)
        assert fuse_gates(net) == (one and library() is not None)
        assert isinstance(net[0], GatedMLP) == (one and library() is not None)
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
