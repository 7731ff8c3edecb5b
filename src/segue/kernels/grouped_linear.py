"""Linear layers with weights in 4 or 8 bits, whose scale and zero are those of a group of inputs: as GPTQ (Frantar et al.,
2022), AWQ (Lin et al., 2023) and compressed-tensors write them.

A weight is `(number - zero) * scale`, nothing more is rounded: what such a layer gives is what the wide weights would
have given, in the dtype of its input.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear as product


class GroupedLinear(nn.Module):
    """Takes and gives any float type."""

    numbers: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    order: torch.Tensor | None
    bias: torch.Tensor | None

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
        self.weight_dtype = dtype
        held = numbers[:, 0::2] | numbers[:, 1::2] << 4 if bits == 4 else numbers
        self.register_buffer("numbers", held.contiguous(), persistent=False)
        self.register_buffer("scale", scale.to(dtype), persistent=False)
        self.register_buffer("zero", zero.to(dtype), persistent=False)
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], as wide as it was, its columns in the order of the inputs."""
        numbers = self.numbers
        if self.bits == 4:
            numbers = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(1)
        groups = numbers.unflatten(1, (self.scale.shape[1], -1)).to(self.weight_dtype)
        wide = ((groups - self.zero[..., None]) * self.scale[..., None]).flatten(1)
        return wide if self.order is None else torch.empty_like(wide).index_copy_(1, self.order, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        return product(x, self.weight.to(x.dtype), self.bias)
