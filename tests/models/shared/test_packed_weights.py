"""Checkpoints that are quantised already, read without another package: the answers of the library on wide weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lm_family import Served, generate, load, make, prompts, varied
from packed_files import (
    Packed,
    awq,
    awq_gemv,
    bitsandbytes4,
    bitsandbytes8,
    compressed,
    copied,
    gptq,
    loaded,
    stream,
    torchao8,
    write,
)
from safetensors.torch import load_file

from lora_files import make_adapter, merge
from segue.graph.deployment.options import LoraPlan
from segue.kernels.cpu.rounded_linear import RoundedLinear, sums_are_exact
from segue.kernels.linear.grouped_linear import GroupedLinear
from segue.kernels.linear.scaled_linear import CodedLinear, ScaledLinear
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.packed.bits import unpacked
from selection import daily

PROMPTS = prompts()
TOKENS = 10
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def of_groups(weights: dict[str, Any], format: str = "pack-quantized", **others: Any) -> dict[str, Any]:
    """A config of compressed-tensors with one group of layers."""
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, **others}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def int8(weight: torch.Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    whole = (weight / scale).round().to(torch.int8)
    return {"weight": whole, "weight_scale": scale}, whole.float() * scale


def int8_tensor(weight: torch.Tensor) -> Packed:
    scale = weight.abs().amax().reshape(1) / 127
    whole = (weight / scale).round().to(torch.int8)
    return {"weight": whole, "weight_scale": scale}, whole.float() * scale


def int8_groups(weight: torch.Tensor) -> Packed:
    """With zero points."""
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round().clamp(-128, 127)
    whole = (groups / scale[..., None] + zero[..., None]).round().clamp(-128, 127)
    wide = ((whole - zero[..., None]) * scale[..., None]).flatten(1)
    tensors = {"weight": whole.flatten(1), "weight_zero_point": zero}
    return {name: part.to(torch.int8) for name, part in tensors.items()} | {"weight_scale": scale}, wide


def fp8(weight: torch.Tensor, strategy: str) -> Packed:
    if strategy == "block":
        rows, columns = -(-weight.shape[0] // 48), -(-weight.shape[1] // 48)
        scale = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                scale[row, column] = weight[row * 48 :, column * 48 :][:48, :48].abs().max() / 448
        spread = scale.repeat_interleave(48, 0)[: len(weight)].repeat_interleave(48, 1)[:, : weight.shape[1]]
    else:
        scale = spread = (
            weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()[None]
        ) / 448
    narrow = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": narrow, "weight_scale": scale}, narrow.float() * spread


def fp8_config(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [48, 48]
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return of_groups(weights, "float-quantized", input_activations=activations)


CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
KINDS: dict[str, tuple[Callable[[torch.Tensor], Packed], dict[str, Any]]] = {
    **{f"gptq {bits} bits": (partial(gptq, bits=bits), {**GPTQ, "bits": bits}) for bits in (2, 3, 4, 8)},
    "gptq in an order": (partial(gptq, ordered=True), {**GPTQ, "desc_act": True, "static_groups": True}),
    "gptq of one group": (partial(gptq, size=10**6), {**GPTQ, "group_size": -1}),
    "gptq of groups that are not whole": (partial(gptq, size=40), {**GPTQ, "group_size": 40}),
    "gptq_v2": (partial(gptq, second=True), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "awq": (awq, AWQ),
    "awq gemv": (awq_gemv, {**AWQ, "version": "gemv"}),
    "pack-quantized": (compressed, of_groups(INT4)),
    "pack-quantized 8 bits by channel": (
        partial(compressed, bits=8, size=None),
        of_groups({**CHANNEL}),
    ),
    "pack-quantized with zeros": (
        partial(compressed, symmetric=False),
        of_groups({**INT4, "symmetric": False}),
    ),
    "pack-quantized in an order": (
        partial(compressed, ordered=True, symmetric=False),
        of_groups({**INT4, "symmetric": False, "actorder": "group"}),
    ),
    "pack-quantized 3 bits": (partial(compressed, bits=3), of_groups({**INT4, "num_bits": 3})),
    "naive int8": (int8, of_groups(CHANNEL, "naive-quantized")),
    "naive int8 by tensor": (int8_tensor, of_groups({**CHANNEL, "strategy": "tensor"}, "naive-quantized")),
    "int8 by group, with zeros": (
        int8_groups,
        of_groups({**INT4, "num_bits": 8, "symmetric": False}, "int-quantized"),
    ),
    **{
        f"fp8 by {strategy}": (partial(fp8, strategy=strategy), fp8_config(strategy))
        for strategy in ("tensor", "channel", "block")
    },
}

BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": True}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}
KINDS |= {
    "bitsandbytes 8 bits": (bitsandbytes8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": (bitsandbytes4, BITSANDBYTES),
    "nf4, nested": (partial(bitsandbytes4, nested=True), BITSANDBYTES),
    "torchao int8": (torchao8, TORCHAO),
    "torchao int8 by group": (partial(torchao8, columns=2), TORCHAO),
}


def with_zeros_for_groups(weight: torch.Tensor) -> Packed:
    """GPTQ whose `g_idx` says nothing."""
    tensors, wide = gptq(weight)
    return tensors | {"g_idx": torch.zeros_like(tensors["g_idx"])}, wide


def without_groups(weight: torch.Tensor) -> Packed:
    """GPTQ in groups of 32, of which the config says something else."""
    tensors, wide = gptq(weight)
    del tensors["g_idx"]
    return tensors, wide


def in_floats(weight: torch.Tensor) -> Packed:
    """NF4 stored as bfloat16, as for training over several devices."""
    tensors, wide = bitsandbytes4(weight)
    return tensors | {"weight": tensors["weight"].view(-1).view(torch.bfloat16)[:, None]}, wide


KINDS |= {
    "gptq with zeros for groups": (with_zeros_for_groups, GPTQ),
    "gptq whose layers differ in size": (without_groups, {**GPTQ, "group_size": 16, "dynamic": {"+:.*": {}}}),
    "nf4 in floats": (in_floats, {**BITSANDBYTES, "bnb_4bit_quant_storage": "bfloat16"}),
}


def in_layers(pack: Callable[[torch.Tensor], Packed]) -> Callable[[str, torch.Tensor], Packed | None]:
    return lambda layer, weight: pack(weight) if ".layers." in layer else None


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_the_files_mean(llama: Path, tmp_path: Path, kind: str) -> None:
    pack, written = KINDS[kind]
    packed, plain = write(llama, tmp_path, in_layers(pack), written)
    model = loaded(packed)
    wide = load_file(plain / "model.safetensors")
    seen = 0
    for name, module in model.named_modules():
        if isinstance(module, GroupedLinear | ScaledLinear | CodedLinear):
            seen += 1
            torch.testing.assert_close(module.weight, wide[f"{name}.weight"], rtol=1e-6, atol=1e-9)
    assert seen == 14


@pytest.mark.parametrize(
    "kind", ["gptq 3 bits", "gptq in an order", "awq", "pack-quantized with zeros", "fp8 by block", "nf4, nested"]
)
def test_answers_are_those_of_the_library_on_wide_weights(llama: Path, tmp_path: Path, kind: str) -> None:
    """Alone, in a batch, after prefix hits."""
    pack, written = KINDS[kind]
    packed, plain = write(llama, tmp_path, in_layers(pack), written)
    theirs = varied(plain, PROMPTS, TOKENS)
    adapter = load(packed)
    assert adapter.weight_bytes < load(plain).weight_bytes
    assert [Served(adapter).run([prompt], TOKENS)[0] for prompt in PROMPTS[::3]] == theirs[::3]
    served = Served(adapter, max_tokens_per_step=48)
    assert served.run(PROMPTS, TOKENS) == theirs
    assert served.run(PROMPTS, TOKENS) == theirs


IN_OTHERS = ("gptq 4 bits", "pack-quantized", "fp8 by channel")


@pytest.mark.parametrize(
    "kind", daily(("gpt2", "qwen3-moe", "mixtral", "gemma2", "bloom"), ("gpt2", "qwen3-moe", "gemma2"))
)
@pytest.mark.parametrize("how", daily(IN_OTHERS, IN_OTHERS[:2]))
def test_other_architectures(tmp_path: Path, kind: str, how: str) -> None:
    """Layers that lie the other way round, experts stored one by one, an embedding that is the head."""
    pack, written = KINDS[how]
    made = make(kind, tmp_path / kind)
    names: list[str] = []

    def inside(layer: str, weight: torch.Tensor) -> Packed | None:
        if not (".layers." in layer or ".h." in layer) or layer.endswith("gate") or min(weight.shape) < 8:
            return None
        names.append(layer)
        if kind != "gpt2":
            return pack(weight)
        tensors, wide = pack(weight.T.contiguous())
        return tensors, wide.T.contiguous()

    packed, plain = write(made, tmp_path, inside, written)
    theirs = generate(plain, PROMPTS, TOKENS)
    assert len({tuple(answer) for answer in theirs}) > 15
    assert Served(load(packed)).run(PROMPTS, TOKENS) == theirs
    assert len(names) > 7


def test_a_packed_head_and_layers_with_other_bits(llama: Path, tmp_path: Path) -> None:
    """GPTQModel's `dynamic`, `lm_head`, and layers that are left out."""

    def pack(layer: str, weight: torch.Tensor) -> Packed | None:
        if layer == "lm_head" or layer.endswith("down_proj"):
            return gptq(weight, bits=8)
        return gptq(weight) if "self_attn" in layer else None

    dynamic = {"+:.*down_proj": {"bits": 8}, "+:lm_head": {"bits": 8}}
    packed, plain = write(
        llama, tmp_path, pack, {**GPTQ, "lm_head": True, "dynamic": dynamic}, tie_word_embeddings=False
    )
    theirs = generate(plain, PROMPTS, TOKENS)
    assert Served(load(packed)).run(PROMPTS, TOKENS) == theirs


def test_groups_of_layers_by_name_by_pattern_and_by_class(llama: Path, tmp_path: Path) -> None:
    def pack(layer: str, weight: torch.Tensor) -> Packed | None:
        if layer.endswith("layers.0.self_attn.q_proj"):
            return compressed(weight, bits=8, size=None)
        if "self_attn" in layer:
            return fp8(weight, "channel")
        return compressed(weight, symmetric=False) if ".layers." in layer else None

    written = of_groups({**INT4, "symmetric": False}, "mixed-precision")
    written["config_groups"]["group_0"]["format"] = "pack-quantized"
    written["config_groups"] |= {
        "group_1": {
            "targets": ["re:.*self_attn.*"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "format": "float-quantized",
        },
        "group_2": {"targets": ["model.layers.0.self_attn.q_proj"], "weights": CHANNEL, "format": "pack-quantized"},
    }
    written["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    packed, plain = write(llama, tmp_path, pack, written)
    assert Served(load(packed)).run(PROMPTS, TOKENS) == generate(plain, PROMPTS, TOKENS)


def test_int8_weights_and_activations(llama: Path, tmp_path: Path) -> None:
    """The very bytes of the file, and activations rounded token by token: near the exact answer, and the same however
    it is served."""
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    written = of_groups(CHANNEL, "int-quantized", input_activations=activations)
    packed, plain = write(llama, tmp_path, in_layers(int8), written)
    model = loaded(packed)
    layers = [module for module in model.modules() if isinstance(module, RoundedLinear | ScaledLinear)]
    assert len(layers) == 14
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    whole, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    layer = model.get_submodule(name)
    assert isinstance(layer, RoundedLinear) == sums_are_exact(whole)
    x = torch.randn(7, whole.shape[1], generator=torch.Generator().manual_seed(0))
    exact = x @ (whole.float() * scale).T
    assert float((layer(x) - exact).norm() / exact.norm()) < 0.01
    if isinstance(layer, RoundedLinear):
        size = x.abs().amax(1, keepdim=True) / 127
        torch.testing.assert_close(layer(x), (x / size).round() @ whole.float().T * scale.T * size)
    adapter = load(packed)
    alone = [Served(adapter).run([prompt], TOKENS)[0] for prompt in PROMPTS]
    served = Served(adapter, max_tokens_per_step=48)
    assert served.run(PROMPTS, TOKENS) == alone
    assert served.run(PROMPTS, TOKENS) == alone
    theirs = generate(plain, PROMPTS, TOKENS)
    assert sum(ours == exact for ours, exact in zip(alone, theirs, strict=True)) > len(theirs) // 2


def test_adapters_over_packed_weights(llama: Path, tmp_path: Path) -> None:
    packed, plain = write(llama, tmp_path, in_layers(awq), AWQ)
    adapter = make_adapter(llama, tmp_path / "a", ("q_proj", "up_proj"), rank=4, seed=1)
    merged = merge(plain, adapter, tmp_path / "merged")
    ours = load(packed, lora=LoraPlan({"a": str(adapter)}))
    from causal_lm_family import add

    from segue.messages.sampling import FALLBACK, SamplingParams

    served = Served(ours)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS).over(FALLBACK)
    for number, prompt in enumerate(PROMPTS[:8]):
        add(served, str(number), "a", prompt, params)
    answers: list[list[int]] = [[] for _ in range(8)]
    while served.engine.has_work():
        for output in served.engine.step():
            assert output.error is None
            answers[int(output.request_id)] += output.token_ids
    assert answers == generate(merged, PROMPTS[:8], TOKENS)


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_a_bias_that_only_the_checkpoint_has(llama: Path, tmp_path: Path, bias: float) -> None:
    packed, _ = write(llama, tmp_path, in_layers(gptq), GPTQ)
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj"
    outputs = tensors[f"{name}.scales"].shape[1]
    more = copied(packed, tmp_path / "more", tensors | {f"{name}.bias": torch.full((outputs,), bias)})
    ours, without = loaded(more).get_submodule(name), loaded(packed).get_submodule(name)
    x = torch.randn(3, outputs)
    torch.testing.assert_close(ours(x), without(x) + bias)


# ── what is wrong, or not read ─────────────────────────────────────────────────────────────────────────────────────


def broken(directory: Path, to: Path, **changes: torch.Tensor | None) -> Path:
    """A checkpoint some of whose tensors of one layer are other ones, or gone."""
    tensors = load_file(directory / "model.safetensors")
    for leaf, tensor in changes.items():
        name = f"model.layers.1.mlp.up_proj.{leaf}"
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    return copied(directory, to, tensors)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("gptq 4 bits", {"scales": None}, r"up_proj.scales' is not in the checkpoint"),
        ("gptq 4 bits", {"qweight": None}, r"up_proj\.\w+' has no qweight"),
        ("gptq 4 bits", {"scales": torch.ones(3, 96).half()}, r"qzeros' is \[2, 12\].*\[3, 12\]"),
        ("gptq 4 bits", {"qweight": torch.zeros(9, 96).int()}, r"qweight' is \[9, 96\].*\[8, 96\]"),
        ("gptq 4 bits", {"qweight": torch.zeros(8, 96)}, r"qweight' is float32 \[8, 96\]; it must be int32"),
        ("gptq in an order", {"g_idx": torch.full((64,), 2).int()}, r"g_idx' names groups from 2 to 2; there are 2"),
        ("gptq in an order", {"g_idx": torch.zeros(60).int()}, r"g_idx' has 60 inputs; the weights have 64"),
        ("gptq in an order", {"g_idx": None}, r"g_idx' is not in the checkpoint, but its config.json has desc_act"),
        ("awq", {"qzeros": None}, r"up_proj.qzeros' is not in the checkpoint"),
        ("awq", {"qweight": torch.zeros(32, 12).int()}, r"scales' is \[2, 96\].*\[1, 96\]"),
        ("pack-quantized", {"weight_scale": None}, r"weight_scale' is not in the checkpoint"),
        ("pack-quantized", {"weight_scale": torch.ones(96, 3)}, r"weight_scale' is \[96, 3\].*\[96, 2\]"),
        ("pack-quantized", {"weight_shape": torch.tensor([96, 48])}, r"weight_packed' is \[96, 8\].*\[96, 6\]"),
        ("pack-quantized with zeros", {"weight_zero_point": None}, r"zero_point' is not in.*not symmetric"),
        ("fp8 by channel", {"weight": torch.ones(96, 64)}, r"up_proj.weight' is float32.*must be float8"),
        ("nf4", {"weight.absmax": torch.ones(95)}, r"weight.absmax' is \[95\].*\[96\]"),
        ("nf4", {"weight.quant_state.bitsandbytes__nf4": None}, r"bitsandbytes__nf4' is not in the checkpoint"),
        (
            "nf4",
            {"weight.quant_state.bitsandbytes__nf4": torch.zeros(3).byte()},
            r"bitsandbytes__nf4' holds no valid JSON",
        ),
        ("torchao int8", {"_weight_scale": torch.ones(5, 1)}, r"_weight_scale' is \[5, 1\], which does not divide"),
        ("bitsandbytes 8 bits", {"SCB": None}, r"up_proj.*"),
        ("fp8 by block", {"weight_scale": torch.ones(1, 2)}, r"weight_scale' is \[1, 2\].*\[2, 2\]"),
    ],
)
def test_broken_checkpoints_are_refused_by_file_and_tensor(
    llama: Path, tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    pack, written = KINDS[kind]
    packed, _ = write(llama, tmp_path, in_layers(pack), written)
    with pytest.raises(ConfigError, match=words) as error:
        load(broken(packed, tmp_path / "broken", **changes))
    assert "broken/model.safetensors: " in str(error.value) or "broken: " in str(error.value)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({**GPTQ, "bits": 5}, r"config.json: quantization_config.bits is 5; supported are 2, 3, 4, 8"),
        ({**GPTQ, "bits": "four"}, r"bits is 'four'; it must be of type int"),
        ({**GPTQ, "checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin'; supported are gptq, gptq_v2"),
        ({**AWQ, "version": "gemv_fast"}, r"version is 'gemv_fast'; supported are gemm, gemv"),
        ({**AWQ, "bits": 8}, r"bits is 8; supported are 4"),
        (of_groups(INT4, "nvfp4-pack-quantized"), r"format is 'nvfp4-pack-quantized'; supported are pack-quantized"),
        (of_groups(INT4, "mxfp4-pack-quantized"), r"format is 'mxfp4-pack-quantized'"),
        (of_groups({**INT4, "num_bits": 9}), r"config_groups.group_0.weights.num_bits is 9"),
        ({**of_groups(INT4), "sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config.format"),
        ({**of_groups(INT4), "transform_config": {"config_groups": {"R1": {}}}}, r"transform_config: rotations"),
        ({"quant_method": "compressed-tensors"}, r"quantization_config: .*config_groups"),
    ],
)
def test_what_is_not_read_is_refused_by_name(llama: Path, tmp_path: Path, written: dict[str, Any], words: str) -> None:
    packed, _ = write(llama, tmp_path, in_layers(gptq), written)
    with pytest.raises(ConfigError, match=words):
        load(packed)


def test_a_layer_that_no_target_names_is_refused(llama: Path, tmp_path: Path) -> None:
    written = of_groups(INT4)
    written["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    packed, _ = write(llama, tmp_path, in_layers(compressed), written)
    with pytest.raises(ConfigError, match=r"mlp.down_proj.weight_packed' is quantised, but no target"):
        load(packed)


def test_a_packed_head_that_is_the_embedding_is_refused(llama: Path, tmp_path: Path) -> None:
    packed, _ = write(
        llama,
        tmp_path,
        lambda layer, weight: gptq(weight) if layer == "lm_head" else None,
        GPTQ,
        tie_word_embeddings=True,
    )
    if "lm_head.qweight" not in load_file(packed / "model.safetensors"):
        pytest.fail("the preset has a head of its own")
    with pytest.raises(ConfigError, match=r"lm_head.*by the config its weights are tied to another layer's"):
        load(packed)


def test_packed_weights_are_not_quantised_again(llama: Path, tmp_path: Path) -> None:
    packed, _ = write(llama, tmp_path, in_layers(awq), AWQ)
    with pytest.raises(ConfigError, match="quantised already"):
        load(packed, quantization="int8")


def test_answers_hang_on_every_tensor(llama: Path, tmp_path: Path) -> None:
    """A change of one number, one scale, one zero or one group is seen."""
    packed, _ = write(llama, tmp_path, in_layers(partial(gptq, ordered=True)), {**GPTQ, "desc_act": True})
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    was = loaded(packed).get_submodule(name).weight
    for leaf, place in (("qweight", (3, 5)), ("qzeros", (1, 2)), ("scales", (1, 7))):
        other = {key: tensor.clone() for key, tensor in tensors.items()}
        other[f"{name}.{leaf}"][place] += 1
        now = loaded(copied(packed, tmp_path / leaf, other)).get_submodule(name).weight
        changed = (was != now).sum()
        assert 0 < changed <= (1 if leaf == "qweight" else 64 * 8)


def test_json_of_the_config_is_left_as_it_was(llama: Path, tmp_path: Path) -> None:
    packed, _ = write(llama, tmp_path, in_layers(awq), AWQ)
    before = (packed / "config.json").read_text()
    load(packed)
    assert (packed / "config.json").read_text() == before
    assert json.loads(before)["quantization_config"] == AWQ


def test_a_row_of_zeros_that_lies_as_a_column() -> None:
    """Zeros of a layer with few outputs are one word for each group."""
    numbers = torch.arange(24).view(8, 3).T.to(torch.uint8) % 16
    words = stream(numbers, 4)
    assert words.shape == (3, 1)
    assert torch.equal(unpacked(words.T.contiguous().T, 4, 8), numbers)
