"""Gated feed-forward layers (Shazeer, *GLU Variants Improve Transformer*, 2020: SwiGLU) on a CPU: the SwiGLU gate
between the two GEMMs in one pass.

Such modules are recognised by what they compute: `fuse` has fused gate and up into one GEMM, and the module returns
`down(silu(gate(x)) * up(x))`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from segue.kernels.cpu.native import Library, library
from segue.kernels.linear.fused_linear import FusedLinear, FusedPart
from segue.kernels.linear.grouped_linear import GroupedLinear

_PROBED = 1e-5
"""Largest difference, relative to the largest value."""


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with gate and up as one GEMM."""

    def __init__(self, compiled: Library, both: FusedLinear, down: nn.Module) -> None:
        """`both`: gate, then up."""
        super().__init__()
        self._compiled = compiled
        self.both = both
        self.down_proj = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] → [..., hidden], float32."""
        both = self.both.linear(x)
        width = both.shape[-1] // 2
        if torch.compiler.is_compiling():
            gate, up = both.split(width, dim=-1)
            return self.down_proj(functional.silu(gate) * up)
        inner = both.new_empty(*both.shape[:-1], width)
        self._compiled.gate(
            *(self._compiled.number, both.data_ptr(), inner.data_ptr(), inner.numel() // width, width),
            torch.get_num_threads(),
        )
        return self.down_proj(inner)


def fuse_gates(root: nn.Module) -> int:
    """Replace every such layer under `root` whose gate and up are fused already by a `GatedMLP`, on a CPU in float32
    with compiled kernels; returns their number."""
    compiled = library()
    if compiled is None:
        return 0
    count = 0
    for name, module in list(root.named_modules()):
        gated = _gated(compiled, module) if name else None
        if gated is not None:
            root.set_submodule(name, gated)
            count += 1
    return count


@torch.no_grad()
def _gated(compiled: Library, module: nn.Module) -> GatedMLP | None:
    parts = [child for child in module.children() if isinstance(child, FusedPart)]
    linears = [child for child in module.children() if type(child) in (nn.Linear, GroupedLinear)]
    if len(parts) != 2 or len(linears) != 1 or parts[0].whole is not parts[1].whole:
        return None
    both, [down] = parts[0].whole, linears
    device, dtype = _held_as(both.linear)
    first, second = both.sizes[0], both.sizes[-1]
    plain = (
        len(both.sizes) == 2 and first == second == down.in_features and down.out_features == both.linear.in_features
    )
    if not plain or device.type != "cpu" or dtype != torch.float32:
        return None
    x = torch.randn(1, 3, both.linear.in_features, generator=torch.Generator().manual_seed(0))
    try:
        theirs = module(x)
    except (TypeError, RuntimeError):
        return None  # it takes other arguments
    ours = GatedMLP(compiled, both, down)
    same = isinstance(theirs, torch.Tensor) and theirs.shape == x.shape
    return ours if same and bool((ours(x) - theirs).abs().max() <= _PROBED * theirs.abs().max()) else None


def _held_as(linear: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of its weight, without dequantising it."""
    if isinstance(linear, GroupedLinear):
        return linear.held_as[0], linear.weight_dtype
    assert isinstance(linear.weight, torch.Tensor)
    return linear.weight.device, linear.weight.dtype
