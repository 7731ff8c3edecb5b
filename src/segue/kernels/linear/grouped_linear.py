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
from torch import nn
from torch.nn.functional import linear as wide_product

from segue.kernels.cpu.native import EIGHTS, EIGHTS_BY_FLOATS, FOURS, FOURS_BY_FLOATS, library, product
from segue.kernels.linear.linear import in_panels

_SCALE = -(2**12)
"""Mask of a scale's float32 bits in a word that it shares with its zero."""
_PARTS = 16
"""A zero in a shared word is a multiple of 1 / 16."""
_FURTHEST = 2**11
"""Range of a zero in a shared word, in sixteenths from the middle: [-2048, 2048)."""


class GroupedWeights(NamedTuple):
    """Quantised weights, `(number - zero) * scale`."""

    numbers: torch.Tensor
    """[outputs, inputs] uint8"""
    scale: torch.Tensor
    """[outputs, groups] float32"""
    zero: torch.Tensor
    """[outputs, groups] float32"""

    @property
    def wide(self) -> torch.Tensor:
        """[outputs, inputs] float32, dequantised."""
        groups = self.numbers.unflatten(1, (self.scale.shape[1], -1)).float()
        return groups.sub_(self.zero[..., None]).mul_(self.scale[..., None]).flatten(1)


def are_words(inputs: int, groups: int, bits: int) -> bool:
    """Whether the numbers of a group fill whole words."""
    return inputs % groups == 0 and inputs // groups % (32 // bits) == 0


def kind_of(scale: torch.Tensor, zero: torch.Tensor, bits: int) -> int:
    """The kind of GEMM for such weights; scale and zero are float32."""
    parts = (zero - _middle(bits)) * _PARTS
    fit = (parts == parts.round()) & (parts >= -_FURTHEST) & (parts < _FURTHEST)
    shared = not bool((scale.view(torch.int32) & ~_SCALE).any()) and bool(fit.all())
    if bits == 4:
        return FOURS if shared else FOURS_BY_FLOATS
    return EIGHTS if shared else EIGHTS_BY_FLOATS


def words_of(weights: GroupedWeights, kind: int, bits: int) -> torch.Tensor:
    """[outputs, words] int32: for each group its scale and zero, then its numbers."""
    numbers, scale, zero = weights
    centred = numbers ^ _middle(bits)
    held = centred[:, 0::2] | centred[:, 1::2] << 4 if bits == 4 else centred
    of_groups = held.contiguous().view(torch.int32).unflatten(1, (scale.shape[1], -1))
    if kind in (FOURS, EIGHTS):
        parts = ((zero - _middle(bits)) * _PARTS).int()
        scales = (scale.view(torch.int32) | parts & ~_SCALE)[..., None]
    else:
        scales = torch.stack([scale, zero], dim=-1).view(torch.int32)
    return torch.cat([scales, of_groups], dim=-1).flatten(1)


def read_words(words: torch.Tensor, kind: int, bits: int, groups: int) -> GroupedWeights:
    """The inverse of `words_of`."""
    of_groups = words.unflatten(1, (groups, -1))
    if kind in (FOURS, EIGHTS):
        shared = of_groups[..., 0]
        scale = (shared & _SCALE).view(torch.float32)
        zero = (shared << 20 >> 20).float() / _PARTS + _middle(bits)
        held = of_groups[..., 1:]
    else:
        scale, zero = (of_groups[..., place].contiguous().view(torch.float32) for place in (0, 1))
        held = of_groups[..., 2:]
    numbers = held.flatten(1).contiguous().view(torch.uint8)
    if bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(1)
    return GroupedWeights(numbers ^ _middle(bits), scale, zero)


def fitting(scale: torch.Tensor) -> torch.Tensor:
    """The nearest scales, float32, that can share a word with their zero."""
    return (scale.float().contiguous().view(torch.int32) - _SCALE // 2 & _SCALE).view(torch.float32)


def _middle(bits: int) -> int:
    return 1 << bits - 1


@torch.library.custom_op("segue::grouped_product", mutates_args=())
def grouped_product(
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, outputs: int, kind: int, group: int
) -> torch.Tensor:
    """`product` as a custom operator for compiled code: [rows, in] → [rows, outputs]."""
    return product(x, panels, bias, outputs, kind, group=group)


@grouped_product.register_fake
def _shape(
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, outputs: int, kind: int, group: int
) -> torch.Tensor:
    return x.new_empty(len(x), outputs)


class GroupedLinear(nn.Module):
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
        compiled = library()
        if compiled is None or numbers.device.type != "cpu" or not are_words(self.in_features, self.groups, bits):
            held = numbers[:, 0::2] | numbers[:, 1::2] << 4 if bits == 4 else numbers
            self.register_buffer("panels", None)
            self.register_buffer("numbers", held.contiguous(), persistent=False)
            self.register_buffer("scale", scale.to(dtype), persistent=False)
            self.register_buffer("zero", zero.to(dtype), persistent=False)
            self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
            return
        weights = GroupedWeights(numbers, scale.detach().float().contiguous(), zero.detach().float().contiguous())
        self.kind = kind_of(weights.scale, weights.zero, bits)
        words = words_of(weights, self.kind, bits).view(torch.float32)
        panels, on = in_panels(words, None if bias is None else bias.detach().float(), compiled.panel)
        self.register_buffer("panels", panels.view(torch.int32), persistent=False)
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
            return read_words(words, self.kind, self.bits, self.groups)
        numbers = self.numbers
        if self.bits == 4:
            numbers = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(1)
        return GroupedWeights(numbers, self.scale, self.zero)

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], dequantised, with columns in the order of the inputs."""
        if self.panels is not None:
            wide = self.grouped.wide.to(self.weight_dtype)
        else:
            numbers, scale, zero = self.grouped
            groups = numbers.unflatten(1, (self.groups, -1)).to(self.weight_dtype)
            wide = ((groups - zero[..., None]) * scale[..., None]).flatten(1)
        return wide if self.order is None else torch.empty_like(wide).index_copy_(1, self.order, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        if self.panels is None:
            return wide_product(x, self.weight.to(x.dtype), self.bias)
        assert self.bias is not None
        rows = x.reshape(-1, self.in_features).float()
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        group = self.in_features // self.groups
        if torch.compiler.is_compiling():
            y = grouped_product(rows, self.panels, self.bias, self.out_features, self.kind, group)
        else:
            y = product(rows, self.panels, self.bias, self.out_features, self.kind, group=group)
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
