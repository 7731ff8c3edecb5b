"""Convolutions over patches that an encoder's input consists of: each covers a whole patch, so it is a linear layer.

Encoders of `transformers` embed patches that a processor has cut with `Conv2d` and `Conv3d`. oneDNN's convolution of
5,264 patches of 2x16x16 pixels takes 172 ms on a core of a Xeon, the GEMM 30 ms."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class PatchConv(nn.Module):
    """A convolution as a linear layer where its input has the size of its kernel, else as it is."""

    def __init__(self, conv: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self.conv = conv

    @property
    def weight(self) -> torch.Tensor:
        """[outputs, channels, *kernel]; encoders read its dtype."""
        return self.conv.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[patches, channels, *size] → [patches, outputs, *size of the result]."""
        if tuple(x.shape[2:]) != self.conv.kernel_size:
            found: torch.Tensor = self.conv(x)
            return found
        rows = functional.linear(x.flatten(1), self.conv.weight.flatten(1), self.conv.bias)
        return rows.view(*rows.shape, *(1 for _ in self.conv.kernel_size))


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
