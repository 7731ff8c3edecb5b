"""Linear layers with 4- or 8-bit weights and a scale and zero per group of inputs, as GPTQ (Frantar et al., 2022), AWQ
(Lin et al., 2023) and compressed-tensors write them.

A weight is `(number - zero) * scale`, and nothing else is rounded: such a layer gives the same result as its
dequantised weights, in the dtype of its input. On a CPU with compiled kernels, GEMMs read the quantised numbers
directly (native/grouped.h) and sum in float32; elsewhere, and if a group does not fill whole 32-bit words, weights are
dequantised at every call. The words that native/grouped.h reads hold a group's numbers and its scale and zero. If a
scale has at most 12 significant bits (float16 has 11, bfloat16 8) and its zero is a multiple of 1/16, both share one
word; otherwise they take two.

Layers of 896 x 9728 that are read from memory, two cores of an EPYC (Zen 5), us, panels of float32 / of bfloat16 / of 4
bits in groups of 32 / of 8 bits in groups of 128: 1 row 1315 / 603 / 289 / 365, 4 rows 1357 / 610 / 516 / 528, 8 rows
1356 / 830 / 925 / 928, 16 rows 2133 / 1609 / 1699 / 1781; from 32 rows on they are equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import linear as wide_gemm

from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.linear.layers import QuantizedLinear


class GroupedWeights(NamedTuple):
    """Quantised weights, `(number - zero) * scale`."""

    numbers: torch.Tensor
    """[outputs, inputs] uint8"""
    scale: torch.Tensor
    """[outputs, groups] float32"""
    zero: torch.Tensor
    """[outputs, groups] float32"""

    @property
    def dequantised(self) -> torch.Tensor:
        """[outputs, inputs] float32, dequantised."""
        groups = self.numbers.unflatten(1, (self.scale.shape[1], -1)).float()
        return groups.sub_(self.zero[..., None]).mul_(self.scale[..., None]).flatten(1)


class GroupedLinear(QuantizedLinear):
    """A linear layer with `GroupedWeights`. Takes and returns any float dtype."""

    numbers: torch.Tensor
    """[out_features, in_features], two per byte if they have 4 bits; only without `panels`."""
    scale: torch.Tensor
    zero: torch.Tensor
    order: torch.Tensor | None
    bias: torch.Tensor | None
    panels: torch.Tensor | None
    """[panels, words, panel] int32: numbers, scales and zeros, in the layout of the compiled kernels."""

    def __init__(
        self,
        numbers: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        bits: int,
        dtype: torch.dtype,
        order: torch.Tensor | None = None,
    ) -> None:
        """numbers [out_features, in_features] uint8, below 2**bits; `bits` is 4 or 8.

        scale and zero [out_features, groups], float: for consecutive groups of equal size. `order` [in_features],
        int64: the input that each column of `numbers` belongs to, if they are permuted (GPTQ's `desc_act`). `dtype`: of
        the weights, as models read it.
        """
        super().__init__()
        self.out_features, self.in_features = numbers.shape
        self.bits = bits
        self.groups = scale.shape[1]
        self.weight_dtype = dtype
        self.register_buffer("order", order, persistent=False)
        self._compiled = compiled = cpu_kernels() if numbers.device.type == "cpu" else None
        if compiled is None or not compiled.are_words(self.in_features, self.groups, bits):
            held = numbers[:, 0::2] | numbers[:, 1::2] << 4 if bits == 4 else numbers
            self.register_buffer("panels", None)
            self.register_buffer("numbers", held.contiguous(), persistent=False)
            self.register_buffer("scale", scale.to(dtype), persistent=False)
            self.register_buffer("zero", zero.to(dtype), persistent=False)
            self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
            return
        weights = GroupedWeights(numbers, scale.detach().float().contiguous(), zero.detach().float().contiguous())
        self.kind, panels, on = compiled.grouped_panels(weights, None if bias is None else bias.detach().float(), bits)
        self.register_buffer("panels", panels, persistent=False)
        self.register_buffer("bias", on, persistent=False)

    @property
    def held_as(self) -> tuple[torch.device, int | None]:
        """Device of its weights, and their kind of GEMM, or None without compiled kernels."""
        return (self.numbers.device, None) if self.panels is None else (self.panels.device, self.kind)

    @property
    def grouped(self) -> GroupedWeights:
        """Its weights, with columns in stored order."""
        if self.panels is not None:
            words = self.panels.transpose(1, 2).reshape(-1, self.panels.shape[1])[: self.out_features]
            assert self._compiled is not None
            return self._compiled.read_words(words, self.kind, self.bits, self.groups)
        numbers = self.numbers
        if self.bits == 4:
            numbers = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(1)
        return GroupedWeights(numbers, self.scale, self.zero)

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], dequantised, with columns in the order of the inputs."""
        if self.panels is not None:
            wide = self.grouped.dequantised.to(self.weight_dtype)
        else:
            numbers, scale, zero = self.grouped
            groups = numbers.unflatten(1, (self.groups, -1)).to(self.weight_dtype)
            wide = ((groups - zero[..., None]) * scale[..., None]).flatten(1)
        return wide if self.order is None else torch.empty_like(wide).index_copy_(1, self.order, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        if self.panels is None:
            return wide_gemm(x, self.weight.to(x.dtype), self.bias)
        assert self._compiled is not None
        assert self.bias is not None
        rows = x.reshape(-1, self.in_features).float()
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        group = self.in_features // self.groups
        gemm = torch.ops.segue.grouped_gemm if torch.compiler.is_compiling() else self._compiled.grouped_gemm
        y = gemm(rows, self.panels, self.bias, self.out_features, self.kind, group)
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


def can_join(layers: Sequence[GroupedLinear]) -> bool:
    """Whether they can be fused into one layer: same weight format and same order of inputs."""
    first = layers[0]
    return all(
        (layer.in_features, layer.groups, layer.bits, layer.weight_dtype, layer.held_as)
        == (first.in_features, first.groups, first.bits, first.weight_dtype, first.held_as)
        and _equal(layer.order, first.order)
        for layer in layers
    )


def joined(layers: Sequence[GroupedLinear]) -> GroupedLinear:
    """One layer with the concatenated outputs of all; a missing bias counts as 0 if others have one."""
    first = layers[0]
    numbers, scale, zero = (torch.cat(parts) for parts in zip(*(layer.grouped for layer in layers), strict=True))
    bias = None
    if any(layer.bias is not None for layer in layers):
        biases = [
            scale.new_zeros(layer.out_features) if layer.bias is None else layer.bias[: layer.out_features]
            for layer in layers
        ]
        bias = torch.cat(biases)
    return GroupedLinear(numbers, scale, zero, bias, bits=first.bits, dtype=first.weight_dtype, order=first.order)


def _equal(order: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return order is other if order is None or other is None else torch.equal(order, other)
