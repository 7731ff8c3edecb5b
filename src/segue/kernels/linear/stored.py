"""Linear layers for weights that a checkpoint stores quantised. They round nothing but what the format rounds."""

from __future__ import annotations

import torch

from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.linear.grouped_linear import GroupedLinear
from segue.kernels.linear.layers import QuantizedLinear
from segue.kernels.linear.scaled_linear import CodedLinear, ScaledLinear

layer_of_groups = GroupedLinear
"""Makes the layer of weights `(number - zero) * scale`, with scale and zero per group of inputs."""
layer_of_codes = CodedLinear
"""Makes the layer of weights that are 4-bit indices into a table, times a scale per block."""


def layer_of_scales(
    held: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    block: tuple[int, int],
    dtype: torch.dtype,
    rounded: bool,
) -> QuantizedLinear:
    """Weights `held` [outputs, inputs], int8 or float8, times a scale per block (outputs, inputs). `rounded`: the
    format rounds activations to int8 as well, which is done where int8 matmuls can sum exactly."""
    outputs, inputs = held.shape
    compiled = cpu_kernels()
    if compiled is not None and rounded and block[1] == inputs and block[0] in (1, outputs):
        layer = compiled.of_scales(held, scale[:, 0].expand(outputs), bias, dtype)
        if layer is not None:
            return layer
    return ScaledLinear(held, scale, bias, block=block, dtype=dtype)
