"""Linear layers with weights that are bytes, or floats of 8 bits, times a scale: as compressed-tensors and torchao
write them. Widened at every call: nothing is rounded, and what goes into the product neither.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear as product


class ScaledLinear(nn.Module):
    """Takes and gives any float type."""

    held: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        held: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        block: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """held [out_features, in_features], int8 or one of the floats of 8 bits. scale [rows, columns]: of blocks of
        `block`, (outputs, inputs); the last of a row or a column may have fewer. `dtype`: of the weights, as models
        read it."""
        super().__init__()
        self.out_features, self.in_features = held.shape
        self.block = block
        self.weight_dtype = dtype
        self.register_buffer("held", held.contiguous(), persistent=False)
        self.register_buffer("scale", scale.to(dtype), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], as wide as it was."""
        scale = self.scale
        outputs, inputs = self.block
        if scale.shape[0] > 1 and outputs > 1:
            scale = scale.repeat_interleave(outputs, 0)[: self.out_features]
        if scale.shape[1] > 1 and inputs > 1:
            scale = scale.repeat_interleave(inputs, 1)[:, : self.in_features]
        return self.held.to(self.weight_dtype) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        return product(x, self.weight.to(x.dtype), self.bias)
