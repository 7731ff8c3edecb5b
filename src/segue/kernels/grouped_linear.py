"""Linear layers with weights in 4 or 8 bits, whose scale and zero are those of a group of inputs: as GPTQ (Frantar et
al., 2022), AWQ (Lin et al., 2023) and compressed-tensors write them.

A weight is `(number - zero) * scale`, nothing more is rounded: what such a layer gives is what the wide weights would
have given, in the dtype of its input. On a CPU, where there are compiled kernels, products read the numbers as they are
(native/grouped.h) and are summed in float32; elsewhere, and where a group is no whole number of words, weights are
widened at every call.

Layers of 896 x 9728 that are read from memory, two cores of an EPYC (Zen 5), us, panels of floats / of halves / of 4
bits in groups of 32 / of 8 bits in groups of 128: 1 row 1315 / 603 / 289 / 365, 4 rows 1357 / 610 / 516 / 528, 8 rows
1356 / 830 / 925 / 928, 16 rows 2133 / 1609 / 1699 / 1781; from 32 rows on they are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import linear as wide_product

from segue.kernels.grouped_words import Grouped, are_words, kind_of, read_words, words_of
from segue.kernels.linear import in_panels
from segue.kernels.native import library, product


@torch.library.custom_op("segue::grouped_product", mutates_args=())
def grouped_product(
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, outputs: int, kind: int, group: int
) -> torch.Tensor:
    """`product` as one operator of compiled code: [rows, in] → [rows, outputs]."""
    return product(x, panels, bias, outputs, kind, group=group)


@grouped_product.register_fake
def _shape(
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, outputs: int, kind: int, group: int
) -> torch.Tensor:
    return x.new_empty(len(x), outputs)


class GroupedLinear(nn.Module):
    """Takes and gives any float type."""

    numbers: torch.Tensor
    """[out_features, in_features], two to a byte where they have 4 bits; where there are no `panels`."""
    scale: torch.Tensor
    zero: torch.Tensor
    order: torch.Tensor | None
    bias: torch.Tensor | None
    panels: torch.Tensor | None
    """[panels, words, panel] int32: numbers, scales and zeros, as the compiled kernels take them."""

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

        scale and zero [out_features, groups], float: of equal, whole groups of inputs, one behind the other. `order`
        [in_features], int64: which input each column of `numbers` belongs to, where that is not its place (GPTQ's
        `desc_act`). `dtype`: of the weights, as models read it.
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
        weights = Grouped(numbers, scale.detach().float().contiguous(), zero.detach().float().contiguous())
        self.kind = kind_of(weights.scale, weights.zero, bits)
        words = words_of(weights, self.kind, bits).view(torch.float32)
        panels, on = in_panels(words, None if bias is None else bias.detach().float(), compiled.panel)
        self.register_buffer("panels", panels.view(torch.int32), persistent=False)
        self.register_buffer("bias", on, persistent=False)

    @property
    def held_as(self) -> tuple[torch.device, int | None]:
        """Where its weights are, and which kind of product takes them, if it is one of the kernels'."""
        return (self.numbers.device, None) if self.panels is None else (self.panels.device, self.kind)

    @property
    def grouped(self) -> Grouped:
        """Its weights, their columns as they are held."""
        if self.panels is not None:
            words = self.panels.transpose(1, 2).reshape(-1, self.panels.shape[1])[: self.out_features]
            return read_words(words, self.kind, self.bits, self.groups)
        numbers = self.numbers
        if self.bits == 4:
            numbers = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(1)
        return Grouped(numbers, self.scale, self.zero)

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], as wide as it was, its columns in the order of the inputs."""
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
    """Whether they can be one layer: their weights are of a form, and their inputs in one order."""
    first = layers[0]
    return all(
        (layer.in_features, layer.groups, layer.bits, layer.weight_dtype, layer.held_as)
        == (first.in_features, first.groups, first.bits, first.weight_dtype, first.held_as)
        and _equal(layer.order, first.order)
        for layer in layers
    )


def joined(layers: Sequence[GroupedLinear]) -> GroupedLinear:
    """One layer with the outputs of all, one behind the other; a bias is 0 where one of them has none."""
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
