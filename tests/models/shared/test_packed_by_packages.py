"""Checkpoints that the packages write themselves, where these are installed: the weights are those that they mean."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lm_family import make
from packed_files import copied, loaded, rounded, write
from safetensors.torch import load_file, save_file

from segue.kernels.cpu.rounded_linear import RoundedLinear


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


def scheme_of(bits: int, kind: str, strategy: str, *, symmetric: bool, activations: bool) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy}
    if strategy == "group":
        weights["group_size"] = 32
    if strategy == "block":
        weights["block_structure"] = [48, 48]
    scheme: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if activations:
        scheme["input_activations"] = {
            "num_bits": 8,
            "type": kind,
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    return scheme


OF_INTEGERS = list(product(("group", "channel", "tensor"), (True, False)))
COMPRESSED = [
    *(("pack-quantized", *how, bits) for how in OF_INTEGERS for bits in (3, 4, 8)),
    *((form, *how, 8) for form in ("naive-quantized", "int-quantized") for how in OF_INTEGERS),
    *(("float-quantized", strategy, True, 8) for strategy in ("group", "channel", "tensor", "block")),
]
"""What the package writes, and is not refused: format, strategy, whether symmetric, bits."""


@pytest.mark.needs("compressed_tensors")
@pytest.mark.parametrize(("form", "strategy", "symmetric", "bits"), COMPRESSED)
def test_compressed_tensors(llama: Path, tmp_path: Path, form: str, strategy: str, symmetric: bool, bits: int) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    kind = "float" if form == "float-quantized" else "int"
    written = scheme_of(bits, kind, strategy, symmetric=symmetric, activations=form == "float-quantized")
    scheme = QuantizationScheme(**written)
    compressor = BaseCompressor.get_value_from_registry(form)

    def pack(layer: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        if ".layers." not in layer:
            return None
        whole = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 48, 0, -weight.shape[0] % 48))
        blocks = {
            "group": lambda: weight.unflatten(1, (-1, 32)),
            "channel": lambda: weight[:, None],
            "tensor": lambda: weight.reshape(1, 1, -1),
            "block": lambda: torch.stack(
                [torch.stack([part.flatten() for part in row.split(48, 1)]) for row in whole.split(48, 0)]
            ),
        }[strategy]()
        assert scheme.weights is not None
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        if strategy == "tensor":
            scale, zero = scale.flatten(), zero.flatten()
        state = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        return dict(state), compressor.decompress(state, scheme)["weight"].float()

    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": written},
        "ignore": ["lm_head"],
    }
    packed, plain = write(llama, tmp_path, pack, config)
    check_weights(packed, plain)


def check_weights(packed: Path, plain: Path, rtol: float = 1e-6, layers: int = 14) -> None:
    model = loaded(packed)
    wide = load_file(plain / "model.safetensors")
    seen = 0
    for name, module in model.named_modules():
        if name.endswith("proj") and not isinstance(module, torch.nn.Linear):
            assert not isinstance(module, RoundedLinear)
            torch.testing.assert_close(module.weight, wide[f"{name}.weight"], rtol=rtol, atol=1e-8)
            seen += 1
    assert seen == layers


@pytest.mark.needs("torchao")
@pytest.mark.parametrize("kind", ["int8", "int8 by group", "float8", "int4 in int8", "int4 with zeros"])
def test_torchao(llama: Path, tmp_path: Path, kind: str) -> None:
    """Written by transformers, which asks the package for it."""
    from torchao import quantization
    from transformers import AutoModelForCausalLM, TorchAoConfig

    made = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(version=2),
        "int8 by group": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int8, granularity=quantization.PerGroup(32)
        ),
        "float8": lambda: quantization.Float8WeightOnlyConfig(version=2),
        "int4 in int8": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
        ),
        "int4 with zeros": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,
            granularity=quantization.PerGroup(32),
            mapping_type=quantization.MappingType.ASYMMETRIC,
        ),
    }[kind]()
    model = AutoModelForCausalLM.from_pretrained(
        llama, dtype=torch.float32, quantization_config=TorchAoConfig(made), device_map="cpu"
    )
    model.save_pretrained(tmp_path / "packed")
    for path in llama.iterdir():
        if "safetensors" not in path.name and not (tmp_path / "packed" / path.name).exists():
            (tmp_path / "packed" / path.name).write_bytes(path.read_bytes())
    wide = {
        name: tensor if type(tensor) is torch.Tensor else tensor.dequantize()
        for name, tensor in model.state_dict().items()
    }
    plain = copied(llama, tmp_path / "plain", {name: tensor.float().contiguous() for name, tensor in wide.items()})
    check_weights(tmp_path / "packed", plain)


@pytest.mark.needs("bitsandbytes")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(llama: Path, tmp_path: Path, kind: str, nested: bool) -> None:
    from bitsandbytes import functional

    def pack(layer: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        if ".layers." not in layer or weight.shape[1] % 64:  # the package widens no blocks over two rows on a CPU
            return None
        held, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        wide = functional.dequantize_4bit(held, state)
        return {"weight": held} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}, wide

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    check_weights(*write(llama, tmp_path, pack, config), rtol=1e-5, layers=12)


@pytest.mark.needs("auto_round")
@pytest.mark.parametrize(
    ("kind", "bits"), [("gptq", 2), ("gptq", 3), ("gptq", 4), ("gptq", 8), ("gptq_v2", 4), ("awq", 4)]
)
def test_auto_round(llama: Path, tmp_path: Path, kind: str, bits: int) -> None:
    """GPTQ and AWQ as auto-round stores them, and as its own layers read them."""
    given: dict[str, torch.Tensor] = {}
    tensors = {name: tensor for file in llama.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, weight in tensors.items():
        if ".layers." in name and weight.ndim == 2:
            layer = name.removesuffix(".weight")
            grid = rounded(weight.float(), bits, 32)
            given |= {f"{layer}.weight": weight.float(), f"{layer}.scale": grid.scale, f"{layer}.zero": grid.zero}
    save_file(given, tmp_path / "weights.safetensors")
    program = Path(__file__).with_name("auto_round_packing.py")
    files = (str(tmp_path / name) for name in ("weights.safetensors", "result.safetensors"))
    subprocess.run([sys.executable, str(program), kind, str(bits), "32", *files], check=True)
    made = load_file(tmp_path / "result.safetensors")

    def pack(layer: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        if f"{layer}.meant" not in made:
            return None
        own = {name.removeprefix(f"{layer}."): part for name, part in made.items() if name.startswith(f"{layer}.")}
        return own, own.pop("meant")

    forms = {"gptq": {"desc_act": False}, "gptq_v2": {"checkpoint_format": "gptq_v2"}, "awq": {"version": "gemm"}}
    config = {"quant_method": "awq" if kind == "awq" else "gptq", "bits": bits, "group_size": 32, **forms[kind]}
    # auto-round widens to float16: half a unit in its last place
    check_weights(*write(llama, tmp_path, pack, config), rtol=2**-11)
