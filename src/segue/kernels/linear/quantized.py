"""Linear layers with weights in 16, 8 or 4 bits, quantised from plain ones when a model loads.

| | weights | activations | where |
|---|---|---|---|
| `RoundedLinear` | int8, a scale per output | int8, a scale per token | CPU (compiled kernels) |
| `RoundedLinear` | bfloat16 | bfloat16 | CPU (compiled kernels) |
| `Int8Linear` | int8, a scale per output | int8, a scale per token | CPU without them (fbgemm) |
| `Bfloat16Linear` | bfloat16 | bfloat16 | CPU without them (oneDNN) |
| `GroupedLinear` | 4 bits, scale and zero per 32 inputs | unrounded, summed in float32 | CPU (compiled kernels) |
| `Int4Linear` | 4 bits, scale and offset per 32 inputs | bfloat16 | CPU without them (oneDNN) |
| `StoredLinear` | int8, float8_e4m3fn or 4 bits | unrounded | anywhere: weights are dequantised at every call |

Layers of checkpoints that are quantised already become a `RoundedLinear`, or a `GroupedLinear`, `ScaledLinear` or
`CodedLinear`, which round nothing.

Every layer rounds each token independently, so a request's result does not depend on the other requests in a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear as gemm

from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.linear.grouped_linear import GroupedLinear
from segue.kernels.linear.layers import QuantizedLinear

GROUP = 32
"""Inputs that share scale and offset in 4 bits."""
_ROWS = 16
"""Outputs are laid out in multiples of this."""
_LARGEST = 127
_FP8_MAX = 448.0
"""Largest value of float8_e4m3fn (Micikevicius et al., FP8 Formats for Deep Learning, 2022)."""


class Int8Linear(QuantizedLinear):
    """int8 times int8, summed in 32 bits. Takes and returns any float dtype; float32 internally."""

    rounds = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [out_features, in_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight_dtype = weight.dtype
        whole, scale = eight_bits(weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch deprecates quantised tensors, but packing needs one
            held = torch._make_per_channel_quantized_tensor(
                whole, scale.double(), torch.zeros(len(scale), dtype=torch.long), 0
            )
            self._packed = torch.ops.quantized.linear_prepack(held, None)
        self.hidden_bytes = whole.nbytes + scale.nbytes
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    bias: torch.Tensor | None

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor with the dtype of the layer's output, which models read."""
        return torch.empty(0, dtype=self.weight_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        rows = x.float()
        # with each token scaled to a largest value of 1, one scale fits all of them
        size = rows.abs().amax(-1, keepdim=True).clamp_min_(1e-12)
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows / size, 1 / _LARGEST, 128, self._packed
        )
        y = y * size if self.bias is None else torch.addcmul(self.bias, y, size)
        return y.to(x.dtype)


class Bfloat16Linear(QuantizedLinear):
    """GEMMs in bfloat16; other operations keep their dtype."""

    rounds = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [out_features, in_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight_dtype = weight.dtype
        self.register_buffer("held", weight.detach().bfloat16())
        self.register_buffer("bias", None if bias is None else bias.detach())

    held: torch.Tensor
    bias: torch.Tensor | None

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], upcast to its original dtype."""
        return self.held.to(self.weight_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        y = gemm(x.bfloat16(), self.held).to(x.dtype)
        return y if self.bias is None else y + self.bias


class Int4Linear(QuantizedLinear):
    """4-bit weights times bfloat16 activations, on a CPU."""

    rounds = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [out_features, in_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight_dtype = weight.dtype
        nibbles, scale, middle = four_bits(weight)
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles.int(), 1))
        both = torch.stack([scale, middle], dim=-1).transpose(0, 1).contiguous()
        self.register_buffer("scales", both.bfloat16())
        self.register_buffer("bias", None if bias is None else bias.detach())

    packed: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor with the dtype of the layer's output, which models read."""
        return torch.empty(0, dtype=self.weight_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        rows = x.reshape(-1, self.in_features).bfloat16()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales).to(x.dtype)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class StoredLinear(QuantizedLinear):
    """Weights stored in fewer bits and dequantised at every call: saves memory, not time."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> None:
        """weight [out_features, in_features]; `kind`: `int8`, `int4` or `fp8`."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kind = kind
        self.weight_dtype = weight.dtype
        middle = None
        if kind == "int4":
            nibbles, scale, middle = four_bits(weight)
            held = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        else:
            most = _FP8_MAX if kind == "fp8" else 127
            wide = weight.detach().float()
            scale = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / most
            held = wide / scale
            held = held.to(torch.float8_e4m3fn) if kind == "fp8" else held.round_().to(torch.int8)
        self.register_buffer("held", held)
        self.register_buffer("scale", scale.to(weight.dtype))
        self.register_buffer("middle", None if middle is None else middle.to(weight.dtype))
        self.register_buffer("bias", None if bias is None else bias.detach())

    held: torch.Tensor
    scale: torch.Tensor
    middle: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], dequantised to its original dtype."""
        if self.middle is None:
            return self.held.to(self.weight_dtype) * self.scale
        nibbles = torch.stack([self.held & 15, self.held >> 4], dim=-1).flatten(1).unflatten(1, (-1, GROUP))
        wide = (nibbles.to(self.weight_dtype) - 8) * self.scale[..., None] + self.middle[..., None]
        return wide.flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        return gemm(x, self.weight, self.bias)


def eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, inputs] → (int8 numbers [outputs, inputs], scale [outputs]).

    A processor without VNNI sums products of two neighbouring inputs in 16 bits: `255 * 128` fits, two times
    `255 * 127` does not. So a scale is only as fine as such pairs allow, on any processor: results are the same on all.
    """
    weight = weight.detach().float()
    pairs = weight.unflatten(1, (-1, 2))
    largest = torch.stack(
        [weight.abs().amax(1), pairs.clamp_min(0).sum(-1).amax(1), pairs.clamp_max(0).sum(-1).neg().amax(1)]
    )
    scale = largest.amax(0).clamp_min_(1e-12) / _LARGEST
    return (weight / scale[:, None]).round_().to(torch.int8), scale


def four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[outputs, inputs] → (numbers from 0 to 15 [outputs, inputs] uint8, scale and middle [outputs, inputs / 32]). The
    weight is `(number - 8) * scale + middle`: the smallest of a group is 0, the largest 15."""
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).clamp_min(1e-12)
    numbers = ((groups - low[..., None]) / scale[..., None]).round_().clamp_(0, 15)
    return numbers.to(torch.uint8).flatten(1), scale, low + 8 * scale


def quantize_linears(
    root: nn.Module,
    kind: str,
    plain: Callable[[nn.Module], tuple[torch.Tensor, torch.Tensor | None] | None],
) -> int:
    """Replace linear layers under `root` by quantised ones, one by one; returns their number.

    `plain` returns weight [outputs, inputs] and bias of a linear layer, else None. Layers of odd shapes stay unchanged:
    at most a router between a few choices.
    """
    count = 0
    for name, child in list(root.named_modules()):
        found = plain(child)
        if found is None or found[0].shape[0] % _ROWS or found[0].shape[1] % GROUP:
            continue
        parent, _, leaf = name.rpartition(".")
        setattr(root.get_submodule(parent), leaf, _made(kind, *found))
        count += 1
    return count


def _made(kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    if weight.device.type != "cpu" or kind == "fp8":
        return StoredLinear(weight, bias, kind)
    compiled = cpu_kernels()
    if kind == "int4":
        if compiled is None:
            return Int4Linear(weight, bias)
        return GroupedLinear(*compiled.four_bits_from_zero(weight, GROUP), bias, bits=4, dtype=weight.dtype)
    rounded = None if compiled is None else compiled.rounded(weight, bias, kind)
    if rounded is not None:
        return rounded
    return Bfloat16Linear(weight, bias) if kind == "bfloat16" else Int8Linear(weight, bias)
