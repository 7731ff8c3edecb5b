"""Linear layers with prepacked weights.

On a CPU in float32, `F.linear` repacks the weight at every call; packing it once makes decode sizes 1.5–2.7 times as
fast, and large ones no slower (measured from 1 to 1024 rows). The packed weight replaces the plain one.

The layout is that of the compiled kernels, if available, else oneDNN's. All GEMMs of a decode step of 387M
parameters, ms, on two cores of a Xeon with AVX-512 (memory is read at 27 GB/s), oneDNN's / the kernels': 1 row 65 / 55,
4 rows 66 / 56, 8 rows 82 / 63, 16 rows 100 / 86, 32 rows 148 / 129; from 64 to 512 rows they are equal. On two cores of
an EPYC (Zen 5; fused multiply-adds alone: 469 GFLOP/s), GFLOP/s of layers of 384 to 4096 features: 16 rows 179-377 /
248-406, 64 rows 324-403 / 368-437, 160 to 4096 rows 331-456 / 322-463; both with AVX2 alone 192-226 / 183-228,
and followed by a GELU 138-170 / 179-218.

Most checkpoints are published in bfloat16. In float32 such weights are the same numbers in twice the bytes, so panels
store them as bfloat16, and the kernels upcast them while loading a register: sums are bit-identical. On two cores of an
EPYC (Zen 4), oneDNN's / panels of float32 / of bfloat16: 1 row 61 / 47 / 24, 8 rows 62 / 48 / 29, 16 rows 78 / 68 / 56,
32 rows 128 / 111 / 109; from 64 rows they are equal.

If a CPU has bfloat16 tiles (AMX), GEMMs with bfloat16 weights use them, with each activation split into three parts
whose sum is the float (native/tiles.h): as exact as float32, and two to three times as fast from 32 rows on. One layer
of 896 x 9728 on two cores of a Xeon, GFLOP/s, oneDNN's in float32 / tiles: 64 rows 400 / 840, 128 rows 420 / 1060, 512
rows 370 / 970.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.nn import functional

from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.linear.layers import PreparedLinear

LEAST_ROWS = 6
"""Minimum rows with oneDNN's layout: fewer are padded to this many. Its GEMM of one row with a packed weight reads
20-25 GB/s, that of six rows 27-37 (two cores; the GEMMs of a decode step of 387M parameters 70 → 58
ms)."""


@torch.library.custom_op("segue::packed_linear", mutates_args=())
def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, gelu: str | None = None
) -> torch.Tensor:
    """`packed_gemm` as a custom operator for compiled code, which has no packed weights: [..., in] → [..., out]."""
    return packed_gemm(x, weight, bias, out_features, gelu)


@packed_linear.register_fake
def _packed_shape(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, gelu: str | None = None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


class PackedLinear(PreparedLinear):
    """`nn.Linear` for inference on a CPU in float32. Weight tying is lost: each layer has its own packed copy."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, rows: int, gelu: str | None = None) -> None:
        """`gelu`: `none` or `tanh`, as in `functional.gelu`, if the layer's output goes through a GELU: it is then
        fused into the GEMM while the result is in the cache, or done in place (2048 rows of 384 → 1536 on two cores: at
        least 1.2 times as fast)."""
        super().__init__()
        self.gelu = gelu
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        bias = None if linear.bias is None else linear.bias.detach()
        packed, padded = laid_out(linear.weight.detach(), bias, rows)
        self.register_buffer("weight", packed, persistent=False)
        self.register_buffer("bias", padded, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features], float32."""
        if x.shape[-1] != self.in_features:  # bfloat16 panels look like float32 panels of half as many inputs
            raise RuntimeError(f"a layer of {self.in_features} inputs got an input of shape {list(x.shape)}")
        if torch.compiler.is_compiling():
            return packed_linear(x, self.weight, self.bias, self.out_features, self.gelu)
        return packed_gemm(x, self.weight, self.bias, self.out_features, self.gelu)


def laid_out(weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Lay out a weight [out, in] and its bias [out] for `packed_gemm`: in panels for compiled kernels, else in
    oneDNN's layout for `rows` as the usual rows per call."""
    compiled = cpu_kernels()
    if compiled is None:
        return torch.ops.mkldnn._reorder_linear_weight(weight, rows), bias
    return compiled.laid_out(weight, bias)


def packed_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, gelu: str | None = None
) -> torch.Tensor:
    """[..., in] → [..., out], with a weight and bias from `laid_out`; `gelu` as in `PackedLinear`."""
    if not weight.is_mkldnn:
        compiled = cpu_kernels()
        assert compiled is not None
        assert bias is not None
        return compiled.panel_gemm(x, weight, bias, out_features, gelu)
    if gelu is not None:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], gelu)
    inputs = x.shape[-1]
    rows = x.numel() // inputs
    if 0 < rows < LEAST_ROWS:
        few = x.reshape(rows, inputs)
        # a single row is broadcast, so nothing is copied
        padded = few.expand(LEAST_ROWS, -1) if rows == 1 else functional.pad(few, (0, 0, 0, LEAST_ROWS - rows))
        made = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], None)[:rows]
        return made.view(*x.shape[:-1], out_features)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], None)


def can_pack(linear: nn.Linear) -> bool:
    """Whether it is a plain, unsharded float32 linear layer on the CPU, without a `forward` of its own."""
    weight = linear.weight
    return (
        type(linear) is nn.Linear
        and type(weight.data) is torch.Tensor  # not a sharded weight
        and "forward" not in vars(linear)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
    )


def pack_linears(module: nn.Module, rows: int, *, keep: Collection[str] = ()) -> int:
    """Replace every linear layer under `module` by a packed one; `rows` is the usual number of rows per call.

    `keep` names submodules (dotted, as in `named_modules`) that stay unchanged with their children, e.g. if the model's
    code reads their `weight`. Returns the number of replaced layers: 0 on other devices and dtypes.
    """
    linears = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    packed = [(name, child) for name, child in linears if name and not _within(name, keep) and can_pack(child)]
    for name, child in packed:
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, PackedLinear(child, rows))
    return len(packed)


def _within(name: str, keep: Collection[str]) -> bool:
    """Whether a module or one of its parents is in `keep`."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in keep for count in range(1, len(parts) + 1))
