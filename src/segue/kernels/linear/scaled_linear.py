"""Linear layers with weights that are dequantised at every call, without further rounding.

`ScaledLinear`: int8 or 8-bit float weights times a scale, as compressed-tensors and torchao write them. `CodedLinear`:
4-bit weights that index 16 numbers of a table, times a scale per block: NF4, FP4 of QLoRA (Dettmers et al., 2023)."""

from __future__ import annotations

import torch
from torch.nn.functional import linear as gemm

from segue.kernels.linear.layers import QuantizedLinear


class CodedLinear(QuantizedLinear):
    """A layer with 4-bit table indices. Takes and returns any float dtype."""

    held: torch.Tensor
    pairs: torch.Tensor
    """[256, 2] float32: the two table values of each byte."""
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
        """held [blocks, size / 2] uint8: all weights, output by output, two per byte, the first in the upper half; the
        last block may be longer than the remaining weights. table [16], scale [blocks]; `shape`: (out_features,
        in_features); `dtype`: of the weights, as models read it."""
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
        """[out_features, in_features], dequantised."""
        wide = self.pairs[self.held.int()].flatten(1).mul_(self.scale[:, None]).to(self.weight_dtype)
        return wide.flatten()[: self.out_features * self.in_features].view(self.out_features, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        return gemm(x, self.weight.to(x.dtype), self.bias)


class ScaledLinear(QuantizedLinear):
    """A layer with int8 or 8-bit float weights. Takes and returns any float dtype."""

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
        """held [out_features, in_features], int8 or an 8-bit float dtype. scale [rows, columns]: for blocks of
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
        """[out_features, in_features], dequantised."""
        scale = self.scale
        outputs, inputs = self.block
        if scale.shape[0] > 1 and outputs > 1:
            scale = scale.repeat_interleave(outputs, 0)[: self.out_features]
        if scale.shape[1] > 1 and inputs > 1:
            scale = scale.repeat_interleave(inputs, 1)[:, : self.in_features]
        return self.held.to(self.weight_dtype) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        return gemm(x, self.weight.to(x.dtype), self.bias)
