"""The compiled kernels against torch's own operators, for every kind of vectors that this CPU has."""

from __future__ import annotations

import shutil
import sysconfig

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_stores import compare, forms, layout, store
from torch import nn
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from segue.kernels.attention.backends.choose import attention_backend
from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.paged_step import paged_step
from segue.kernels.cpu.gated_mlp import GatedMLP, fuse_gates
from segue.kernels.cpu.native import TILED, Library, libraries, library
from segue.kernels.cpu.native_attention import NativeAttention
from segue.kernels.cpu.norms import FusedNorm, fuse_norms
from segue.kernels.linear.fused_linear import fuse, siblings
from segue.kernels.linear.linear import PackedLinear, laid_out, pack_linears, packed_gemm

compiled = pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
every = pytest.mark.parametrize("kernels", libraries(), ids=lambda kernels: f"set {kernels.number}")


def test_they_are_there_where_they_can_be():
    machine, compiler = sysconfig.get_platform(), shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
    with open("/proc/cpuinfo") as info:
        able = machine == "linux-x86_64" and compiler is not None and "avx2" in info.read()
    assert bool(libraries()) == able, "installed without a compiler: `pip install -e .` again"


def _product(
    kernels: Library, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False
) -> torch.Tensor:
    halves = weight.dtype == torch.bfloat16
    weight = weight.view(torch.float32) if halves else weight
    outputs, inputs = weight.shape
    panels = -(-outputs // kernels.panel)
    padded = torch.zeros(panels * kernels.panel, inputs)
    padded[:outputs] = weight
    on = functional.pad(bias, (0, len(padded) - outputs))
    laid = padded.view(panels, kernels.panel, inputs).transpose(1, 2).contiguous()
    y = torch.full((len(x), outputs), torch.nan)
    kernels.product(
        *(kernels.number, x.data_ptr(), len(x), x.shape[1], laid.data_ptr(), halves, on.data_ptr(), y.data_ptr()),
        *(outputs, gelu, 0, 0, 2),
    )
    return y


@compiled
@every
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 1200), st.integers(1, 130), st.integers(0, 99))
def test_products(kernels: Library, rows: int, inputs: int, outputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    exact = (x.double() @ weight.double().T + bias).float()
    made = _product(kernels, x, weight, bias)
    torch.testing.assert_close(made, exact, rtol=1e-5, atol=1e-5 * inputs**0.5)
    row = seed % rows
    assert torch.equal(_product(kernels, x[row : row + 1].clone(), weight, bias)[0], made[row]), "others change a row"


@compiled
@every
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 600), st.integers(1, 130), st.integers(0, 99))
def test_products_with_halves_are_those_with_the_same_floats(
    kernels: Library, rows: int, pairs: int, outputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(rows, 2 * pairs, generator=generator), torch.randn(outputs, generator=generator)
    weight = torch.randn(outputs, 2 * pairs, generator=generator).bfloat16()
    made = _product(kernels, x, weight, bias)
    if kernels.number < TILED or pairs % 16:
        assert torch.equal(made, _product(kernels, x, weight.float(), bias))
    row = seed % rows
    assert torch.equal(_product(kernels, x[row : row + 1].clone(), weight, bias)[0], made[row]), "others change a row"


tiled = pytest.mark.skipif(not libraries() or libraries()[0].number < TILED, reason="this CPU has no tiles")


@tiled
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 200), st.integers(0, 99))
def test_products_of_tiles_are_as_exact_as_floats(rows: int, steps: int, outputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 32 * steps, generator=generator) * 10.0 ** torch.randint(-6, 7, (), generator=generator)
    bias = torch.randn(outputs, generator=generator)
    weight = torch.randn(outputs, 32 * steps, generator=generator).bfloat16()
    made = _product(libraries()[0], x, weight, bias)
    exact = x.double() @ weight.double().T + bias
    size = x.abs().double() @ weight.abs().double().T + bias.abs()
    assert ((made - exact).abs() / size).max() < (3 * steps + 8) * 2.0**-24, "a rounding for each sum of a tile"
    row = seed % rows
    alone = _product(libraries()[0], x[row : row + 1].clone(), weight, bias)
    assert torch.equal(alone[0], made[row]), "others change a row"


@tiled
def test_what_is_no_number_stays_so_in_tiles() -> None:
    x, weight, bias = torch.randn(40, 64), torch.randn(50, 64).bfloat16(), torch.randn(50)
    x[3, 5], x[4, 6], x[5, 7], x[6, 8] = torch.inf, -torch.inf, torch.nan, torch.finfo().max
    x[7, 9] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # a NaN whose upper half is infinite
    exact = (x.double() @ weight.double().T + bias).float()
    made = _product(libraries()[0], x, weight, bias)
    torch.testing.assert_close(made, exact, rtol=1e-4, atol=1e-4, equal_nan=True)
    weight[2, 2] = torch.inf
    laid, on = laid_out(weight.float(), bias, 8)
    exact = (x.double() @ weight.double().T + bias).float()
    torch.testing.assert_close(packed_gemm(x, laid, on, 50), exact, rtol=1e-4, atol=1e-4, equal_nan=True)


@compiled
@every
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.sampled_from([31, 32, 64, 288]), st.integers(1, 130), st.booleans())
def test_gelu_behind_a_product(kernels: Library, rows: int, inputs: int, outputs: int, halves: bool) -> None:
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs) * 20
    weight = weight.bfloat16() if halves and inputs % 2 == 0 else weight
    expected = functional.gelu(functional.linear(x, weight.float(), bias), approximate="tanh")
    made = _product(kernels, x, weight, bias, gelu=True)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


@compiled
@pytest.mark.parametrize("gelu", ["none", "tanh"])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_layers_of_many_rows_with_a_gelu(gelu: str, precision: torch.dtype) -> None:
    linear = nn.Linear(64, 90).requires_grad_(False)
    linear.weight.copy_(linear.weight.to(precision))
    packed, x = PackedLinear(linear, 256, gelu), torch.randn(2, 70, 64)
    torch.testing.assert_close(packed(x), functional.gelu(linear(x), approximate=gelu), rtol=1e-4, atol=1e-5)
    assert not packed.weight.is_mkldnn


@compiled
@every
def test_products_of_many_rows(kernels: Library) -> None:
    x, weight, bias = torch.randn(600, 100), torch.randn(70, 100), torch.randn(70)
    torch.testing.assert_close(
        _product(kernels, x, weight, bias), functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4
    )


@compiled
def test_a_layout_holds_its_weight_once_and_takes_any_shape():
    weight, bias = torch.randn(96, 40), torch.randn(96)
    laid, on = laid_out(weight, bias, 8)
    assert laid.nbytes == weight.nbytes
    x = torch.randn(2, 5, 40)
    torch.testing.assert_close(packed_gemm(x, laid, on, 96), functional.linear(x, weight, bias))
    assert packed_gemm(x[:, :0], laid, on, 96).shape == (2, 0, 96)
    with pytest.raises(RuntimeError, match="float64"):
        packed_gemm(x.double(), laid, on, 96)


@compiled
@pytest.mark.parametrize("inputs", [40, 41])
def test_a_layout_of_weights_that_are_bfloat16_takes_half_the_memory(inputs: int) -> None:
    weight, bias, x = torch.randn(90, inputs).bfloat16().float(), torch.randn(90), torch.randn(3, inputs)
    weight[3, 5], weight[4, 0] = torch.inf, -0.0
    laid, on = laid_out(weight, bias, 8)
    padded = -(-90 // library().panel) * library().panel
    assert laid.nbytes == padded * inputs * (2 if inputs % 2 == 0 else 4)
    assert laid.dtype == torch.float32, "what modules read of a weight is the type that they compute in"
    torch.testing.assert_close(packed_gemm(x, laid, on, 90), functional.linear(x, weight, bias))
    weight[7, 7] += 2.0**-20
    laid, on = laid_out(weight, bias, 8)
    assert laid.nbytes == padded * inputs * 4, "one weight of full precision"
    torch.testing.assert_close(packed_gemm(x, laid, on, 90), functional.linear(x, weight, bias))


@compiled
@every
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1, 1, 1, 2, 7])), min_size=1, max_size=6),
    st.sampled_from([(1, 1), (2, 1), (6, 2), (4, 4), (7, 1)]),
    forms,
    st.integers(0, 100),
    st.sampled_from([1, 4, 64]),
    st.sampled_from([16, 48]),
)
def test_attention_equals_the_reference(kernels, spans, heads, form, seed, pieces, dim):
    compare("cpu", spans, heads, form, seed, pieces, backend=NativeAttention(kernels), dim=dim)


@compiled
@every
@pytest.mark.parametrize("window", [None, 700])
def test_attention_over_many_keys_is_split(kernels: Library, window: int | None) -> None:
    compare("cpu", [(1500, 1)], (6, 2), (window, None, False), 0, backend=NativeAttention(kernels), size=64, dim=32)
    compare(
        "cpu", [(900, 1), (0, 1)], (2, 1), (window, None, False), 1, backend=NativeAttention(kernels), size=64, dim=32
    )
    among_short_ones = [(40, 1), (70, 1), (2000, 1), (3, 1), (130, 1)]
    compare(
        "cpu", among_short_ones, (8, 2), (window, None, False), 2, backend=NativeAttention(kernels), size=64, dim=32
    )


@compiled
@every
def test_what_is_not_a_number_stays_so_and_stays_at_home(kernels: Library) -> None:
    own = store(1, dim=16)
    parts = layout([(5, 1), (11, 1)])
    own.keys[0][parts[1].blocks[0], 1] = torch.nan
    q, k, v = torch.ones(2, 2, 16), torch.ones(1, 2, 16), torch.ones(1, 2, 16)
    out = NativeAttention(kernels).attend(0, q, k, v, paged_step(own, parts), AttentionOptions(1.0))
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Gemma3RMSNorm])
@compiled
@torch.inference_mode()
def test_norms_are_found_by_what_they_compute(kind: type[nn.Module]) -> None:
    net = nn.Sequential(kind(48, eps=1e-6), nn.LayerNorm(48), kind(20, eps=1e-3))
    nn.init.normal_(net[0].weight)
    nn.init.normal_(net[2].weight)
    x, heads = (
        torch.randn(2, 7, 48),
        torch.randn(1, 9, 6, 40)[..., 10:30],
    )  # q, as a slice of one GEMM
    x[0, 0] = 1e-4
    expected, narrow = net[0](x), net[2](heads)
    assert fuse_norms(net) == 2
    assert [type(module) for module in net] == [FusedNorm, nn.LayerNorm, FusedNorm]
    torch.testing.assert_close(net[0](x), expected)
    torch.testing.assert_close(net[2](heads), narrow)
    torch.testing.assert_close(net[0](x[0, 0]), expected[0, 0])


def test_norms_that_may_be_given_a_gate_stay() -> None:
    net = nn.Sequential(KimiLinearRMSNormGated(24), MambaRMSNormGated(24, 24))
    assert fuse_norms(net) == 0


@compiled
@torch.inference_mode()
def test_gated_layers_are_found_by_what_they_compute() -> None:
    for act, wanted in (("silu", 1), ("gelu", 0)):
        net = nn.Sequential(Qwen2MLP(Qwen2Config(hidden_size=24, intermediate_size=50, hidden_act=act)))
        x = torch.randn(3, 24) * 20
        with siblings(net) as found:
            expected = net(x)
        fuse(net, found)
        assert fuse_gates(net) == wanted
        assert isinstance(net[0], GatedMLP) == bool(wanted)
        pack_linears(net, 8)
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
        x[1, 3] = torch.nan
        assert net(x)[[0, 2]].isfinite().all()
        assert net(x)[1].isnan().all()


def test_a_cpu_takes_them_by_default():
    chosen = attention_backend("auto", torch.device("cpu"), 16)
    assert isinstance(chosen, NativeAttention) == (library() is not None)
