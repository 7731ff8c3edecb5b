"""Weights laid out in panels, and GEMMs with them."""

from __future__ import annotations

import torch

from segue.kernels.cpu.native import FLOATS, HALVES, gemm, halves_are_tiled, library


def laid_out(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay out a weight [out, in] and its bias [out] for `panel_gemm`.

    Panels are [panels, in, panel], their bias [panels * panel], both 0 after the last output. If every weight is
    exact in bfloat16, panels are [panels, in / 2, panel]: each float32 word holds two bfloat16 weights of one output.
    """
    compiled = library()
    assert compiled is not None
    halves = _halves(weight)
    return in_panels(weight.contiguous() if halves is None else halves, bias, compiled.panel)


def panel_gemm(
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, out_features: int, gelu: str | None
) -> torch.Tensor:
    """[..., in] → [..., out], with panels and bias from `laid_out`; `gelu`: `none` or `tanh`, to be applied."""
    inputs = x.shape[-1]
    rows = x.numel() // inputs
    kind = kind_of(panels.shape[1], inputs)
    made = gemm(x.reshape(rows, inputs), panels, bias, out_features, kind, gelu=gelu == "tanh")
    if gelu == "none":
        torch.ops.aten.gelu_(made)
    return made.view(*x.shape[:-1], out_features)


def kind_of(depth: int, inputs: int) -> int:
    """The format of panels from `laid_out` that have `depth` words for each output."""
    return HALVES if depth * 2 == inputs else FLOATS


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
