"""Finds RMSNorms (Zhang & Sennrich, 2019) in a library's network by what they compute, not by name, and replaces them.

A norm has one weight and one small number, and gives `x / sqrt(mean(x²) + eps)` times the weight, or times the weight
plus one. The library computes it with six operators; on a GPU `TorchNorm` is one kernel, on a CPU
`segue.kernels.cpu.norms.FusedNorm`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest difference of a norm from what it replaces, relative to the row's largest value, by dtype: the library rounds
before it multiplies by the weight."""


class TorchNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, computed in float32, in one kernel on a GPU."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [width]."""
        super().__init__()
        self._eps = eps
        self.register_buffer("weight", weight.contiguous(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] → [..., width], both in the weight's dtype."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self._eps)


def norms_by_torch(root: nn.Module, device: torch.device) -> int:
    """Replace the norms under `root` by `TorchNorm`s; none if its weights are of several dtypes, since a norm then may
    be given another than its own. Returns their number."""
    if len({one.dtype for one in root.parameters() if one.is_floating_point()}) != 1:
        return 0
    return replace_norms(root, TorchNorm, device, NEAR)


def replace_norms(
    root: nn.Module,
    make: Callable[[torch.Tensor, float], nn.Module],
    device: torch.device,
    near: Mapping[torch.dtype, float],
) -> int:
    """Replace every norm under `root` on `device`, in the dtypes of `near`, by what `make` gives for its weight and
    small number; returns their number. `near`: as `NEAR`."""
    norms = [(name, module) for name, module in root.named_modules() if name]
    count = 0
    for name, module in norms:
        made = _replacement(module, make, device, near)
        if made is not None:
            root.set_submodule(name, made)
            count += 1
    return count


@torch.no_grad()
def _replacement(
    module: nn.Module,
    make: Callable[[torch.Tensor, float], nn.Module],
    device: torch.device,
    near: Mapping[torch.dtype, float],
) -> nn.Module | None:
    own = dict(module.named_parameters())
    numbers = [value for name, value in vars(module).items() if type(value) is float and 0 < value < 1e-2]
    if list(own) != ["weight"] or len(numbers) != 1 or [*module.buffers(), *module.children()]:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None  # it may take a gate as well
    weight = own["weight"].detach()
    if weight.ndim != 1 or weight.device.type != device.type or weight.dtype not in near:
        return None
    generator = torch.Generator().manual_seed(0)
    # rows of ordinary size, and some so small that eps matters
    x = torch.randn(1, 4, len(weight), generator=generator) * torch.tensor([1.0, 30.0, 1e-2, 1e-3])[:, None]
    x = x.to(weight.device, weight.dtype)
    try:
        theirs = module(x)
    except (TypeError, RuntimeError, AttributeError):
        return None  # it takes other arguments
    if not isinstance(theirs, torch.Tensor) or theirs.shape != x.shape or theirs.dtype != x.dtype:
        return None
    # a weight plus one is rounded if it is not in float32
    for scale in (weight, weight + 1) if weight.dtype == torch.float32 else (weight,):
        ours = make(scale, numbers[0])
        if _alike(ours(x), theirs, near[weight.dtype]):
            return ours
    return None


def _alike(ours: torch.Tensor, theirs: torch.Tensor, near: float) -> bool:
    """Compare row by row, so that small rows count as much as large ones."""
    differences = (ours.float() - theirs.float()).abs().amax(-1)
    return bool((differences <= near * theirs.float().abs().amax(-1)).all())
