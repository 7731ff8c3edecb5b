"""Linear layers with weights of 4 bits that stand for 16 numbers of a table, times a scale for each block: NF4 and FP4
of QLoRA (Dettmers et al., 2023). Widened at every call: nothing is rounded.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear as product


class CodedLinear(nn.Module):
    """Takes and gives any float type."""

    held: torch.Tensor
    pairs: torch.Tensor
    """[256, 2] float32: what the two numbers of a byte stand for."""
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        held: torch.Tensor,
        table: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """held [blocks, size / 2] uint8: of all weights, one output after the other, two to a byte, the first in the
        upper half; the last block may have more than there are weights. table [16], scale [blocks]; `shape`:
        (out_features, in_features); `dtype`: of the weights, as models read it."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.weight_dtype = dtype
        self.register_buffer("held", held.contiguous(), persistent=False)
        pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=-1)
        self.register_buffer("pairs", pairs.float(), persistent=False)
        self.register_buffer("scale", scale.float(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], as wide as it was."""
        wide = self.pairs[self.held.int()].flatten(1).mul_(self.scale[:, None]).to(self.weight_dtype)
        return wide.flatten()[: self.out_features * self.in_features].view(self.out_features, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        return product(x, self.weight.to(x.dtype), self.bias)
