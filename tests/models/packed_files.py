"""Checkpoints with packed weights, made of plain ones by the layouts that are published, and what their weights are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.models.shared.checkpoint.pretrained import load_config, load_model
from segue.models.shared.library import PreTrainedModel

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors by the last parts of their names, and the weight [outputs, inputs] that they mean."""


def stream(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, count] → [rows, words] int32: bit after bit, the lowest first."""
    bit = (numbers.numpy().astype(np.int64)[:, :, None] >> np.arange(bits)) & 1
    row = bit.reshape(len(numbers), -1).astype(np.uint8)
    row = np.pad(row, ((0, 0), (0, -row.shape[1] % 32)))
    return torch.from_numpy(np.packbits(row, axis=1, bitorder="little").view(np.int32).copy())


class Rounded(NamedTuple):
    numbers: torch.Tensor
    """[outputs, inputs] int32, below 2**bits."""
    scale: torch.Tensor
    """[outputs, groups] float32, representable in float16."""
    zero: torch.Tensor
    """[outputs, groups] int32"""
    group: torch.Tensor
    """[inputs]"""

    @property
    def wide(self) -> torch.Tensor:
        return (self.numbers - self.zero[:, self.group]).float() * self.scale[:, self.group]


def rounded(
    weight: torch.Tensor, bits: int, size: int, *, symmetric: bool = False, group: torch.Tensor | None = None
) -> Rounded:
    """The nearest numbers; zeros are 1 at least, as the first version of GPTQ's format wants."""
    outputs, inputs = weight.shape
    group = torch.arange(inputs) // size if group is None else group
    groups = int(group.max()) + 1
    most = 2**bits - 1
    scale, zero = torch.empty(outputs, groups), torch.empty(outputs, groups)
    for number in range(groups):
        own = weight[:, group == number]
        if symmetric:
            scale[:, number] = own.abs().amax(1) / (most / 2)
            zero[:, number] = 2 ** (bits - 1)
        else:
            low, high = own.amin(1).clamp_max(0), own.amax(1).clamp_min(0)
            scale[:, number] = (high - low) / most
            scale[:, number] += scale[:, number] == 0  # of a row of zeros
            zero[:, number] = (-low / scale[:, number]).round().clamp(1, most)
    scale = scale.half().float()
    numbers = (weight / scale[:, group] + zero[:, group]).round().clamp(0, most).int()
    return Rounded(numbers, scale, zero.int(), group)


def gptq(weight: torch.Tensor, bits: int = 4, size: int = 32, *, ordered: bool = False, second: bool = False) -> Packed:
    """`ordered`: columns belong to groups as they were quantised, not as they lie (`desc_act`)."""
    inputs = weight.shape[1]
    group = torch.arange(inputs) // size
    if ordered:
        group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    made = rounded(weight, bits, size, group=group)
    tensors = {
        "qweight": stream(made.numbers, bits).T.contiguous(),
        "qzeros": stream(made.zero.T - (0 if second else 1), bits),
        "scales": made.scale.T.contiguous().half(),
        "g_idx": group.int(),
    }
    return tensors, made.wide


def _in_words(numbers: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """[rows, columns] → [rows, columns / 8] int32, in each word these of 8 columns, the lowest bits first."""
    words = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int32)
    for place, column in enumerate(order):
        words |= numbers[:, column::8].int() << (4 * place)
    return words


def awq(weight: torch.Tensor, size: int = 32) -> Packed:
    """Of version `gemm`."""
    made = rounded(weight, 4, size)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": _in_words(made.numbers.T, order),
        "qzeros": _in_words(made.zero.T, order),
        "scales": made.scale.T.contiguous().half(),
    }
    return tensors, made.wide


def awq_gemv(weight: torch.Tensor, size: int = 32) -> Packed:
    """The width of zeros is in multiples of four words for groups of 32."""
    made = rounded(weight, 4, size)
    width = (made.zero.shape[1] + 31) // 32 * 4
    zero = torch.nn.functional.pad(made.zero, (0, width * 8 - made.zero.shape[1]))
    scale = torch.nn.functional.pad(made.scale, (0, width * 8 - made.scale.shape[1]))
    tensors = {
        "qweight": _in_words(made.numbers, tuple(range(8))),
        "qzeros": _in_words(zero, tuple(range(8))),
        "scales": scale.half(),
    }
    return tensors, made.wide


def compressed(
    weight: torch.Tensor, bits: int = 4, size: int | None = 32, *, symmetric: bool = True, ordered: bool = False
) -> Packed:
    """`pack-quantized`; `size` None: a scale for each output."""
    inputs = weight.shape[1]
    size = inputs if size is None else size
    group = torch.arange(inputs) // size
    if ordered:
        group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    made = rounded(weight, bits, size, symmetric=symmetric, group=group)
    tensors = {
        "weight_packed": stream(made.numbers, bits),
        "weight_scale": made.scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = stream(made.zero.T, bits).T.contiguous()
    if ordered:
        tensors["weight_g_idx"] = group.int()
    return tensors, made.wide


def bitsandbytes8(weight: torch.Tensor) -> Packed:
    largest = weight.abs().amax(1)
    whole = (weight * (127 / largest[:, None])).round().to(torch.int8)
    tensors = {"weight": whole, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, whole.float() * largest[:, None] / 127


def bitsandbytes4(weight: torch.Tensor, *, nested: bool = False) -> Packed:
    """Any table will do; blocks of 64 go over the ends of rows."""
    table = torch.cat([-(torch.linspace(1, 0.1, 8) ** 2), torch.linspace(0, 1, 8) ** 2])
    blocks = weight.reshape(-1, 64)
    largest = blocks.abs().amax(1)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    tensors = {"weight.absmax": largest, "weight.quant_map": table}
    if nested:
        offset = float(largest.mean())
        own = (largest - offset).abs().max()[None]
        bytes_table = torch.linspace(-1, 1, 256)
        numbers = ((largest - offset) / own * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
        largest = bytes_table[numbers.int()] * own + offset
        tensors |= {
            "weight.absmax": numbers,
            "weight.nested_absmax": own,
            "weight.nested_quant_map": bytes_table,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    numbers = ((blocks / largest[:, None])[..., None] - table).abs().argmin(-1).to(torch.uint8)
    flat = numbers.flatten()
    tensors["weight"] = (flat[0::2] << 4 | flat[1::2])[:, None]
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors, (table[numbers.int()] * largest[:, None]).reshape(weight.shape)


def torchao8(weight: torch.Tensor, *, columns: int = 1) -> Packed:
    """Scales of rows, or of parts of them, with zeros."""
    groups = weight.unflatten(1, (columns, -1))
    if columns == 1:
        scale = groups.abs().amax(-1) / 127
        zero = torch.zeros_like(scale)
    else:
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        scale = (high - low) / 255
        zero = (-128 - low / scale).round().clamp(-128, 127)
    whole = (groups / scale[..., None] + zero[..., None]).round().clamp(-128, 127)
    tensors = {
        "_weight_qdata": whole.flatten(1).to(torch.int8),
        "_weight_scale": scale,
        "_weight_zero_point": zero.to(torch.int8),
    }
    return tensors, ((whole - zero[..., None]) * scale[..., None]).flatten(1)


def write(
    directory: Path,
    to: Path,
    pack: Callable[[str, torch.Tensor], Packed | None],
    written: dict[str, Any],
    **config: Any,
) -> tuple[Path, Path]:
    """(the checkpoint with packed weights, the same one with wide ones). `pack`: what becomes of a layer, by its name;
    None: it stays as it is."""
    packed, plain = {}, {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            layer, _, leaf = name.rpartition(".")
            made = pack(layer, tensor.float()) if leaf == "weight" and tensor.ndim == 2 else None
            if made is None:
                packed[name] = plain[name] = tensor
                continue
            plain[name] = made[1].contiguous()
            packed.update({f"{layer}.{part}": of.contiguous() for part, of in made[0].items()})
    return (
        copied(directory, to / "packed", packed, quantization_config=written, **config),
        copied(directory, to / "plain", plain, **config),
    )


def copied(directory: Path, to: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """The same checkpoint with these weights."""
    to.mkdir(parents=True)
    for path in directory.iterdir():
        if "safetensors" not in path.name:
            (to / path.name).write_bytes(path.read_bytes())
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(written))
    return to


def loaded(directory: Path) -> PreTrainedModel:
    """The library's model, as it is served on a CPU in float32."""
    context = AutoregressiveContext(directory, "llm", device=torch.device("cpu"), dtype=torch.float32)
    return load_model(context, load_config(context))
