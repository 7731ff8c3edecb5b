"""Linear layers with weights laid out for oneDNN.

On a CPU in float32, `F.linear` lays the weight out anew at every call; done once, decode sizes run 1.5–2.7 times as
fast, and large ones no slower (measured from 1 to 1024 rows). The packed weight takes the place of the plain one.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.nn import functional

DECODE_ROWS = 8
"""Rows per call of a decoder on a CPU, most of the time: what its weights are laid out for."""

LEAST_ROWS = 6
"""Fewer rows are computed as if they were so many: oneDNN's product of one row with a packed weight reads 20-25 GB/s
where that of six reads 27-37 (two cores; the products of a decode step of 387M parameters 70 → 58 ms)."""


@torch.library.custom_op("segue::packed_linear", mutates_args=())
def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, gelu: str | None = None
) -> torch.Tensor:
    """The product as one operator of compiled code, which knows no packed weights: [..., in] → [..., out]."""
    return _product(x, weight, bias, gelu)


@packed_linear.register_fake
def _packed_shape(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, gelu: str | None = None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gelu: str | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none" if gelu is None else "gelu", [], gelu)


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU in float32. Weight tying is lost: each one holds its own packed copy."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, rows: int, gelu: str | None = None) -> None:
        """`gelu`: `none` or `tanh`, as `functional.gelu` calls them, where the layer's output goes through that: oneDNN
        does it while the product is still in the cache (2048 rows of 384 → 1536 on two cores: 1.2 times as fast)."""
        super().__init__()
        self.gelu = gelu
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self.register_buffer("weight", packed, persistent=False)
        bias = None if linear.bias is None else linear.bias.detach()
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features], float32."""
        if torch.compiler.is_compiling():
            return packed_linear(x, self.weight, self.bias, self.out_features, self.gelu)
        if self.gelu is not None:
            return _product(x, self.weight, self.bias, self.gelu)
        rows = x.numel() // self.in_features
        if 0 < rows < LEAST_ROWS:
            few = packed_product(x.reshape(rows, -1), self.weight, self.bias)
            return few.view(*x.shape[:-1], self.out_features)
        return packed_product(x, self.weight, self.bias)


def packed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., in] → [..., out], the weight as `_reorder_linear_weight` lays it out. x of few rows is [rows, in]."""
    rows = len(x)
    if x.ndim == 2 and 0 < rows < LEAST_ROWS:
        # the same row several times over, as far as there is one row: nothing is copied
        padded = x.expand(LEAST_ROWS, -1) if rows == 1 else functional.pad(x, (0, 0, 0, LEAST_ROWS - rows))
        return torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], None)[:rows]
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], None)


def can_pack(linear: nn.Linear) -> bool:
    """On the CPU, in float32, with no forward of its own (a subclass, or what quantises activations), whole."""
    weight = linear.weight
    return (
        type(linear) is nn.Linear
        and type(weight.data) is torch.Tensor  # not a rank's share of one
        and "forward" not in vars(linear)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
    )


def pack_linears(module: nn.Module, rows: int, *, keep: Collection[str] = ()) -> int:
    """Replace every linear layer under `module` by a packed one; `rows` is the usual number of rows per call.

    `keep` names submodules (dotted, as in `named_modules`) that stay as they are with all that is in them, e.g. one
    whose `weight` the model's code reads. Returns how many were replaced: none on other devices and dtypes.
    """
    linears = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    packed = [(name, child) for name, child in linears if name and not _within(name, keep) and can_pack(child)]
    for name, child in packed:
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, PackedLinear(child, rows))
    return len(packed)


def _within(name: str, keep: Collection[str]) -> bool:
    """Whether a module, or one that it is in, is among those kept."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in keep for count in range(1, len(parts) + 1))
