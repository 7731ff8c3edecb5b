"""Weights in 8 and 4 bits: close to the exact model, the same answers in any batch, with adapters over them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lm_family import Served, load, make, prompts
from packed_files import copied
from safetensors.torch import load_file

from lora_files import make_adapter, merge
from segue.engines.autoregressive.contract import FlatBatch
from segue.graph.deployment.options import LoraPlan
from segue.kernels.attention.paged_step import Part, paged_step
from segue.kernels.cpu.grouped import four_bits_from_zero, kind_of
from segue.kernels.cpu.native import BYTES, FOURS, ROUNDED, library
from segue.kernels.cpu.rounded_linear import RoundedLinear
from segue.kernels.kv.layout import uniform
from segue.kernels.kv.store import KVStore
from segue.kernels.linear.grouped_linear import GroupedLinear
from segue.kernels.linear.layers import QuantizedLinear
from segue.kernels.linear.quantized import (
    GROUP,
    Bfloat16Linear,
    Int4Linear,
    Int8Linear,
    StoredLinear,
    eight_bits,
    four_bits,
    quantize_linears,
)
from segue.messages.errors import ConfigError
from segue.models.text.causal_lm.llm import LLM

KINDS = ("llama", "gpt2", "qwen3-moe")
WITHIN = {"bfloat16": 0.05, "int8": 0.3, "fp8": 0.4, "int4": 0.65}
"""Of tiny random models, which make ten times as much of an error as a single GEMM has: the difference of all logits
of a text over the logits, as norms."""
PROMPTS = prompts()[:20]
TOKENS = 10


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


def logits_of(adapter: LLM, count: int = 48) -> torch.Tensor:
    """[tokens, vocab] of one text."""
    kv = adapter.kv
    store = KVStore(
        kv.layout(adapter.max_model_len) if kv.shapes or kv.windows else uniform(kv.layers, kv.kv_heads, kv.head_dim),
        num_blocks=64,
        block_size=8,
        dtype=kv.dtype,
        device=adapter.device,
    )
    ids = (torch.arange(count) * 7919 + 1) % 600
    batch = FlatBatch(ids, None, torch.arange(count)[None], paged_step(store, [Part(range(count // 8), 0, count)]))
    with torch.inference_mode():
        hidden, _ = adapter.forward(adapter.embed(ids, None), batch)
        return adapter.logits(hidden)


def apart(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


def test_close_to_the_exact_model(directory: Path) -> None:
    exact = load(directory)
    errors = {}
    for kind, within in WITHIN.items():
        small = load(directory, quantization=kind)
        errors[kind] = apart(logits_of(small), logits_of(exact))
        assert 1e-4 < errors[kind] < within
        assert small.weight_bytes < exact.weight_bytes
    assert errors["bfloat16"] < errors["int8"] < errors["fp8"] < errors["int4"]


@pytest.mark.parametrize("kind", WITHIN)
def test_the_same_answers_however_served(directory: Path, kind: str) -> None:
    """Alone, in a batch, in pieces, after prefix hits and preemption: no token is rounded by what is beside it."""
    adapter = load(directory, quantization=kind)
    alone = [Served(adapter).run([prompt], TOKENS)[0] for prompt in PROMPTS]
    assert len({tuple(answer) for answer in alone if len(answer) > 2}) > 8
    served = Served(adapter, max_tokens_per_step=48)
    assert served.run(PROMPTS, TOKENS) == alone
    assert served.run(PROMPTS, TOKENS) == alone
    tight = Served(adapter, num_blocks=14, max_tokens_per_step=64)
    assert tight.run(PROMPTS, TOKENS) == alone
    assert tight.engine.stats()["preemptions_total"] > 0


@pytest.mark.skipif(library() is None, reason="the kernels were not compiled, or not for this CPU")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_played_back(llama: Path, kind: str) -> None:
    adapter = load(llama, quantization=kind)
    expected = Served(adapter, enforce_eager=True).run(PROMPTS, TOKENS)
    served = Served(adapter, max_batch=6)
    served.engine.warm_up()
    assert served.run(PROMPTS, TOKENS) == expected
    assert served.engine.stats()["recorded_steps_total"] > 0


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_adapters_over_quantised_weights(llama: Path, tmp_path: Path, kind: str) -> None:
    """The adapter itself is exact: only the weights below it are rounded."""
    path = make_adapter(llama, tmp_path / "a", ("q_proj", "up_proj"), rank=4, seed=1)
    merged = load(merge(llama, path, tmp_path / "merged"))
    plan = LoraPlan({"a": str(path)})
    small = load(llama, quantization=kind, lora=plan)
    assert small.lora is not None
    from segue.engines.autoregressive.contract import Prompt

    ids = (torch.arange(48) * 7919 + 1) % 600
    kv = small.kv
    store = KVStore(
        uniform(kv.layers, kv.kv_heads, kv.head_dim), num_blocks=8, block_size=8, dtype=kv.dtype, device=small.device
    )
    prompt = Prompt(ids.tolist(), adapter=small.lora.named("a"))
    step = paged_step(store, [Part(range(6), 0, 48)])
    batch = FlatBatch(ids, None, torch.arange(48)[None], step, [(prompt, 0, 48)])
    with torch.inference_mode():
        hidden, _ = small.forward(small.embed(ids, None), batch)
        ours = small.logits(hidden)
    assert apart(ours, logits_of(merged)) < WITHIN[kind]
    assert apart(ours, logits_of(load(llama))) > 0.4
    assert apart(ours, logits_of(load(llama, quantization=kind))) > 0.4


# ── the layers ─────────────────────────────────────────────────────────────────────────────────────────────────────


def weights(rows: int = 96, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    return weight, torch.randn(rows, generator=generator)


@pytest.mark.parametrize(
    ("kind", "within"),
    [
        *(("bytes", 0.03), ("halves", 0.01), ("int8", 0.03), ("bfloat16", 0.01), ("int4", 0.1), ("grouped", 0.1)),
        *(("stored int8", 0.01), ("stored fp8", 0.04), ("stored int4", 0.1)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(kind: str, within: float, dtype: torch.dtype) -> None:
    weight, bias = (tensor.to(dtype) for tensor in weights())
    if kind in ("bytes", "halves") and library() is None:
        pytest.skip("the kernels were not compiled, or not for this CPU")
    layers: dict[str, Any] = {
        "bytes": partial(RoundedLinear, kind=BYTES),
        "halves": partial(RoundedLinear, kind=ROUNDED),
        "int8": Int8Linear,
        "bfloat16": Bfloat16Linear,
        "int4": Int4Linear,
        "grouped": lambda weight, bias: GroupedLinear(
            *four_bits_from_zero(weight, GROUP), bias, bits=4, dtype=weight.dtype
        ),
    }
    name, _, stored = kind.partition(" ")
    layer = StoredLinear(weight, bias, stored) if name == "stored" else layers[name](weight, bias)
    x = torch.randn(2, 9, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 3] *= 1000  # what one token is like is nothing to the others
    x[1, 4] = 0
    with torch.inference_mode():
        y = layer(x)
        single = torch.stack([torch.stack([layer(x[a : a + 1, b : b + 1])[0, 0] for b in range(9)]) for a in range(2)])
    exact = x.float() @ weight.float().T + bias.float()
    assert y.dtype == dtype
    assert y.shape == (2, 9, 96)
    errors = (y.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(errors.max()) < within + (0.01 if dtype == torch.bfloat16 else 0)
    error = float((y - single).float().norm() / y.float().norm())
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_products_of_pairs_fit_into_16_bits() -> None:
    """Activations go up to 255; processors without VNNI cut off sums that do not fit."""
    weight, _ = weights()
    weight[3] = -1
    weight[4, 1::2] = 0
    weight[5, 1::2] = -weight[5, 0::2]
    weight[6] = 0
    whole, scale = eight_bits(weight)
    pairs = whole.int().unflatten(1, (-1, 2))
    assert int(pairs.clamp_min(0).sum(-1).max()) * 255 < 2**15
    assert int(pairs.clamp_max(0).sum(-1).min()) * 255 >= -(2**15)
    assert int(whole[4].abs().max()) == 127
    torch.testing.assert_close(whole * scale[:, None], weight, rtol=0, atol=float(scale.max()) * 0.51)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(2))
    size = x.abs().amax(1, keepdim=True)
    exact = ((x / size * 127).round().double() @ whole.double().T) * scale / 127 * size
    torch.testing.assert_close(Int8Linear(weight, None)(x), exact.float(), rtol=1e-5, atol=1e-5)


def test_four_bits_keep_the_ends_of_a_group() -> None:
    weight, _ = weights()
    numbers, scale, middle = four_bits(weight)
    wide = (numbers.float().unflatten(1, (-1, GROUP)) - 8) * scale[..., None] + middle[..., None]
    groups = weight.unflatten(1, (-1, GROUP))
    torch.testing.assert_close(wide.amin(-1), groups.amin(-1))
    torch.testing.assert_close(wide.amax(-1), groups.amax(-1))
    assert float(((wide - groups).abs() / scale[..., None]).max()) < 0.5001


def test_four_bits_from_a_zero_are_no_less_exact() -> None:
    weight, _ = weights(96, 256)
    weight[:8] += 3  # whole groups on one side of 0, near it and far away
    weight[8:16] -= 1000
    weight[16] = 0
    weight[17] = -0.7
    weight[18] *= 1e-20
    numbers, scale, middle = four_bits(weight)
    groups = weight.unflatten(1, (-1, GROUP))
    most = ((numbers.float().unflatten(1, (-1, GROUP)) - 8) * scale[..., None] + middle[..., None] - groups).abs()
    ours = four_bits_from_zero(weight, GROUP)
    assert kind_of(ours.scale, ours.zero, 4) == FOURS
    off = (ours.dequantised.unflatten(1, (-1, GROUP)) - groups).abs()
    usual = [*range(8), *range(19, 96)]
    assert float(off[usual].square().sum() / most[usual].square().sum()) < 1.01
    assert float((off / (scale[..., None] * 0.55 + groups.abs() * 0.006)).max()) < 1


@pytest.mark.skipif(library() is None, reason="the kernels were not compiled, or not for this CPU")
def test_products_of_four_bits_are_nearer_where_they_are_compiled() -> None:
    weight, bias = weights(96, 512)
    net = torch.nn.Sequential(torch.nn.Linear(512, 96))
    net[0].weight.data, net[0].bias.data = weight, bias
    quantize_linears(net, "int4", lambda module: (weight, bias) if type(module) is torch.nn.Linear else None)
    assert isinstance(net[0], GroupedLinear)
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    exact = x @ weight.T + bias
    assert apart(net[0](x), exact) < apart(Int4Linear(weight, bias)(x), exact)


def test_odd_shapes_stay_as_they_are() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 1), torch.nn.Linear(30, 32))

    def plain(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return (module.weight, module.bias) if type(module) is torch.nn.Linear else None

    assert quantize_linears(net, "int8", plain) == 1
    assert [isinstance(layer, QuantizedLinear) for layer in net] == [True, False, False]


# ── checkpoints that are quantised ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("written", "package"),
    [
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"quant_method": "hqq", "quant_config": {}}, "hqq|HQQ"),
        ({"quant_method": "quark"}, "quark|Quark"),
        ({"quant_method": "unheard-of"}, "unheard-of"),
    ],
)
def test_a_format_whose_package_is_missing_is_refused_by_name(
    llama: Path, tmp_path: Path, written: dict[str, Any], package: str
) -> None:
    for path in llama.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    config = json.loads((llama / "config.json").read_text()) | {"quantization_config": written}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=package):
        load(tmp_path)
    with pytest.raises(ConfigError, match="quantised already"):
        load(tmp_path, quantization="int8")


def test_weights_published_in_fp8_are_those_that_the_file_means(llama: Path, tmp_path: Path) -> None:
    """In the layout of DeepSeek-V3 and Qwen3-FP8; on a CPU the library widens them when they are read."""
    plain, stored, wrong = {}, {}, {}
    for file in sorted(llama.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            plain[name] = stored[name] = wrong[name] = weight
            if ".layers." in name and weight.ndim == 2:
                scale = weight.abs().max() / 448
                narrow = (weight / scale).to(torch.float8_e4m3fn)
                stored[name] = wrong[name] = narrow
                stored[name + "_scale_inv"] = scale.reshape(1, 1)
                wrong[name + "_scale_inv"] = 2 * scale.reshape(1, 1)
                plain[name] = narrow.float() * scale
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    meant = logits_of(load(copied(llama, tmp_path / "plain", plain)))
    read = logits_of(load(copied(llama, tmp_path / "fp8", stored, quantization_config=method)))
    other = logits_of(load(copied(llama, tmp_path / "wrong", wrong, quantization_config=method)))
    assert apart(read, meant) < 0.03
    assert apart(other, meant) > 0.1
