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

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from segue.kernels.cpu.native import FLOATS, HALVES, halves_are_tiled, library, product

DECODE_ROWS = 8
"""Usual rows per call of a decoder on a CPU, for which its weights are laid out."""

LEAST_ROWS = 6
"""Minimum rows with oneDNN's layout: fewer are padded to this many. Its GEMM of one row with a packed weight reads
20-25 GB/s, that of six rows 27-37 (two cores; the GEMMs of a decode step of 387M parameters 70 → 58
ms)."""


@torch.library.custom_op("segue::packed_linear", mutates_args=())
def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, gelu: str | None = None
) -> torch.Tensor:
    """`packed_product` as a custom operator for compiled code, which has no packed weights: [..., in] → [..., out]."""
    return packed_product(x, weight, bias, out_features, gelu)


@packed_linear.register_fake
def _packed_shape(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, gelu: str | None = None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


class PackedLinear(nn.Module):
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
        return packed_product(x, self.weight, self.bias, self.out_features, self.gelu)


def laid_out(weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Lay out a weight [out, in] and its bias [out] for `packed_product`: in panels for compiled kernels, else in
    oneDNN's layout for `rows` as the usual rows per call.

    Panels are [panels, in, panel], their bias [panels * panel], both 0 after the last output. If every weight is
    exact in bfloat16, panels are [panels, in / 2, panel]: each float32 word holds two bfloat16 weights of one output.
    """
    compiled = library()
    if compiled is None:
        return torch.ops.mkldnn._reorder_linear_weight(weight, rows), bias
    halves = _halves(weight)
    return in_panels(weight.contiguous() if halves is None else halves, bias, compiled.panel)


def in_panels(words: torch.Tensor, bias: torch.Tensor | None, panel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """32-bit words [out, n] and bias [out] → (panels [panels, n, panel], their bias [panels * panel]), float32."""
    outputs, count = words.shape
    panels = -(-outputs // panel)
    padded = words.new_zeros(panels * panel) if bias is None else _padded(bias, panels * panel)
    whole = words if outputs == len(padded) else _padded(words, len(padded))
    return whole.view(panels, panel, count).transpose(1, 2).contiguous(), padded


def _halves(weight: torch.Tensor) -> torch.Tensor | None:
    """[out, in] → [out, in / 2], two bfloat16 weights per float32 word; None if that would lose precision."""
    weight = weight.contiguous()
    if weight.shape[1] % 2 or weight.view(torch.int16)[:, ::2].count_nonzero():
        return None
    if halves_are_tiled(weight.shape[1]) and not weight.isfinite().all():  # infinity times a zero part would be NaN
        return None
    return weight.to(torch.bfloat16).view(torch.float32)


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    padded = tensor.new_zeros(length, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded


def packed_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, gelu: str | None = None
) -> torch.Tensor:
    """[..., in] → [..., out], with a weight and bias from `laid_out`; `gelu` as in `PackedLinear`."""
    inputs = x.shape[-1]
    rows = x.numel() // inputs
    if not weight.is_mkldnn:
        assert bias is not None
        kind = HALVES if weight.shape[1] * 2 == inputs else FLOATS
        made = product(x.reshape(rows, inputs), weight, bias, out_features, kind, gelu=gelu == "tanh")
        if gelu == "none":
            torch.ops.aten.gelu_(made)
        return made.view(*x.shape[:-1], out_features)
    if gelu is not None:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], gelu)
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


@contextmanager
def bypassed(root: nn.Module) -> Iterator[set[str]]:
    """Collects, while `root` runs, the names of linear layers that were not called although their parent module was:
    the parent's code may read their weights directly. The yielded set is filled on exit."""
    called: set[str] = set()
    found: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, given, name=name: called.add(name))
        for name, module in root.named_modules()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    linears = {name for name, module in root.named_modules() if isinstance(module, nn.Linear)}
    found |= {name for name in linears - called if name.rpartition(".")[0] in called}


def _within(name: str, keep: Collection[str]) -> bool:
    """Whether a module or one of its parents is in `keep`."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in keep for count in range(1, len(parts) + 1))
