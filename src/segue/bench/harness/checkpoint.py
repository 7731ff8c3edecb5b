"""Make the checkpoints of benchmarks, and files of weights: in bfloat16, and those that some lossy optimisations need
(GGUF, and a LoRA adapter)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from segue.messages.errors import ConfigError
from segue.models.registry import tiny_preset
from segue.models.shared.tiny.made import filled

ADAPTED = ("to_q", "to_k", "to_v", "to_out.0")
"""Layers that LoRA trainers choose by default."""
RANK = 16


def made_once(target: Path, known: str, make: Callable[[Path], object]) -> Path:
    """The directory of a checkpoint, filled by `make` unless it has the file `known`."""
    if not (target / known).is_file():
        with filled(target) as made:
            make(made)
    return target


def preset(cache: Path, name: str, size: str, known: str, kept: str = "float32", field: str = "size") -> Path:
    """A preset of `segue tiny` under `cache`, made if absent, with weights of dtype `kept` on the disk. Raises
    `ConfigError` for a size that it does not have; `field`: the option that names the size."""
    tiny = tiny_preset(name)
    if size not in tiny.sizes:
        raise ConfigError(f"{name} has no size {size!r}; it has {', '.join(tiny.sizes)}", field=field)

    def make(directory: Path) -> None:
        tiny.make(directory, size, 0)
        if kept == "bfloat16":
            keep_in_bfloat16(directory)

    return made_once(cache / f"{name}-{size}{'-bf16' if kept == 'bfloat16' else ''}", known, make)


def keep_in_bfloat16(directory: Path) -> None:
    """Round the weights of all files below a checkpoint's directory to bfloat16, and store them so."""
    for path in sorted(directory.rglob("*.safetensors")):
        tensors = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})


def write_gguf(network: Path, file: Path, kind: str) -> None:
    """Write the weights of a network's directory as GGUF: linear layers as `kind` if their rows are whole blocks of it,
    all others in float32. Needs the package gguf."""
    import gguf
    from gguf.quants import quantize

    packed = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[packed]
    writer = gguf.GGUFWriter(str(file), "segue")
    for name, tensor in _tensors(network):
        values = tensor.float().numpy()
        if tensor.ndim == 2 and name.endswith(".weight") and tensor.shape[-1] % block == 0:
            writer.add_tensor(name, quantize(values, packed), raw_dtype=packed)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_untrained_lora(network: Path, file: Path) -> None:
    """Write an untrained LoRA adapter for the attention of a network's directory: it changes nothing, and costs as much
    as a trained one."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in _tensors(network):
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and layer.endswith(ADAPTED):
            outputs, inputs = tensor.shape
            down = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            tensors[f"{network.name}.{layer}.lora_A.weight"] = down
            tensors[f"{network.name}.{layer}.lora_B.weight"] = torch.zeros(outputs, RANK)
    save_file(tensors, file)


def rank_of(adapter: Path) -> int:
    """The largest rank in an adapter: a file, or a directory with one."""
    ranks = [0]
    for file in [adapter] if adapter.is_file() else adapter.glob("*.safetensors"):
        ranks += [len(tensor) for name, tensor in _tensors(file) if ".lora_A." in name or ".lora_down." in name]
    return max(ranks)


def _tensors(network: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, or of those in a directory."""
    for file in [network] if network.is_file() else sorted(network.glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dict
                yield name, tensors.get_tensor(name)
