"""Run the layers of the library's SEANet decoders over pieces of utterances. Families name the library's classes, which
differ by model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from segue.models.shared.speech.pieces import Carry


@dataclass(frozen=True, slots=True)
class Kinds:
    """The library's classes of layers. All others are elementwise."""

    conv: type[Any]
    transposed: type[Any]
    residual: type[Any]


def run(layer: Any, x: Tensor, carry: Carry, kinds: Kinds) -> Tensor:
    """One layer over [B, C, t]."""
    out: Tensor
    if isinstance(layer, kinds.conv):
        conv = layer.conv
        back = (conv.kernel_size[0] - 1) * conv.dilation[0] + 1 - conv.stride[0]
        out = conv(carry.behind(x, back) if back else x)
    elif isinstance(layer, kinds.transposed):
        stride, count = layer.conv.stride[0], x.shape[-1]
        back = -(-(layer.conv.kernel_size[0] - stride) // stride)
        # the library trims what inputs to come would add to
        out = layer(carry.behind(x, back, padded=False) if back else x)
        out = out[..., out.shape[-1] - count * stride :]
    elif isinstance(layer, kinds.residual):
        inner = x
        for part in layer.block:
            inner = run(part, inner, carry, kinds)
        out = inner + run(layer.shortcut, x, carry, kinds)
    else:
        out = layer(x)
    return out
