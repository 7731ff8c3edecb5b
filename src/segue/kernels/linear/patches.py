"""Convolutions over patches that an encoder's input consists of: each covers a whole patch, so it is a linear layer.

Encoders of `transformers` embed patches that a processor has cut with `Conv2d` and `Conv3d`. oneDNN's convolution of
5,264 patches of 2x16x16 pixels takes 172 ms on a core of a Xeon, the GEMM 30 ms."""

from __future__ import annotations

import torch
from torch import nn


class PatchConv(nn.Module):
    """A convolution over patches of the size of its kernel, as the linear layer that it is, which can be packed: then a
    patch's result does not depend on the patches next to it."""

    def __init__(self, conv: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        weight = conv.weight.detach().flatten(1)
        self._size = conv.kernel_size
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], conv.bias is not None, device="meta")
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        if conv.bias is not None:
            self.linear.bias = nn.Parameter(conv.bias.detach(), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """Encoders read its dtype."""
        return self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[patches, channels, *size] → [patches, outputs, 1, …]."""
        rows: torch.Tensor = self.linear(x.flatten(1))
        return rows.view(*rows.shape, *(1 for _ in self._size))


def embed_patches(root: nn.Module) -> int:
    """Replace such convolutions under `root`; returns their number."""
    count = 0
    for name, module in list(root.named_modules()):
        if name and type(module) in (nn.Conv2d, nn.Conv3d) and _covers_patches(module):
            root.set_submodule(name, PatchConv(module))
            count += 1
    return count


def _covers_patches(conv: nn.Conv2d | nn.Conv3d) -> bool:
    return (
        conv.kernel_size == conv.stride
        and conv.groups == 1
        and set(conv.dilation) == {1}
        and not isinstance(conv.padding, str)
        and not any(conv.padding)
    )
