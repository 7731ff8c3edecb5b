"""Root mean square norms (Zhang & Sennrich, 2019) on a CPU in one pass, where the library writes six operators.

Which modules are such norms is seen from what they compute, not read from names: one weight and one small number, and
`x / sqrt(mean(x²) + eps)` times the weight, or times one more than it.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from segue.kernels.native import Library, library

_PROBED = 1e-5
"""Largest difference, relative to the largest value."""


class FusedNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension."""

    weight: torch.Tensor

    def __init__(self, compiled: Library, weight: torch.Tensor, eps: float) -> None:
        """weight: [width] float32."""
        super().__init__()
        self._compiled = compiled
        self._eps = eps
        self.register_buffer("weight", weight.contiguous(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] → [..., width], float32."""
        if torch.compiler.is_compiling():
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self.weight
        rows = (
            x
            if x.ndim == 3
            else x.reshape(-1, x.shape[-2], x.shape[-1])
            if x.ndim > 3
            else x.reshape(1, -1, x.shape[-1])
        )
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        outer, inner, width = rows.shape
        y = x.new_empty(x.shape)
        self._compiled.norm(
            *(self._compiled.number, rows.data_ptr(), rows.stride(0), rows.stride(1), self.weight.data_ptr()),
            *(self._eps, y.data_ptr(), outer, inner, width, torch.get_num_threads()),
        )
        return y


def fuse_norms(root: nn.Module) -> int:
    """Put a `FusedNorm` in the place of every such norm under `root`, on a CPU in float32 where there are compiled
    kernels; how many."""
    compiled = library()
    if compiled is None:
        return 0
    norms = [(name, module) for name, module in root.named_modules() if name]
    count = 0
    for name, module in norms:
        fused = _fused(compiled, module)
        if fused is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(root.get_submodule(parent), leaf, fused)
            count += 1
    return count


@torch.no_grad()
def _fused(compiled: Library, module: nn.Module) -> FusedNorm | None:
    own = dict(module.named_parameters())
    numbers = [value for name, value in vars(module).items() if type(value) is float and 0 < value < 1e-2]
    if list(own) != ["weight"] or len(numbers) != 1 or [*module.buffers(), *module.children()]:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None  # a gate may be given to it
    weight = own["weight"].detach()
    if weight.ndim != 1 or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    generator = torch.Generator().manual_seed(0)
    # rows of ordinary size, and some so small that eps counts
    x = torch.randn(1, 4, len(weight), generator=generator) * torch.tensor([1.0, 30.0, 1e-2, 1e-3])[:, None]
    try:
        theirs = module(x)
    except (TypeError, RuntimeError, AttributeError):
        return None  # it is called with something else
    if not isinstance(theirs, torch.Tensor) or theirs.shape != x.shape:
        return None
    for scale in (weight, weight + 1):
        ours = FusedNorm(compiled, scale, numbers[0])
        if bool((ours(x) - theirs).abs().max() <= _PROBED * theirs.abs().max()) and _alike(ours(x), theirs):
            return ours
    return None


def _alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Row by row: small rows count as much as large ones."""
    differences = (ours - theirs).abs().amax(-1)
    return bool((differences <= _PROBED * theirs.abs().amax(-1)).all())
