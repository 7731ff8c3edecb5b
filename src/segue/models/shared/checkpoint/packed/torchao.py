"""Read weights of torchao as transformers writes them to safetensors: int8 and float8.

`_weight_qdata` [outputs, inputs]; `_weight_scale` and, if present, `_weight_zero_point` [rows, columns], one per block
of weights: a weight is `(number - zero) * scale`. Int8 activations are rounded with a scale per token if the checkpoint
requires that; float8 ones are not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from segue.models.shared.checkpoint.packed.weights import (
    Grouped,
    Scaled,
    Tensors,
    Unreadable,
    Weights,
    floats_of,
    in_order,
    same,
    taken,
)

_ROUNDED = "Int8DynamicActivationInt8WeightConfig"
_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


class Torchao:
    leaves = same(
        *("_weight_qdata", "_weight_scale", "_weight_zero_point"),
        *("_weight_scale_and_zero", "_weight_per_tensor_scale", "_weight_act_pre_scale"),
    )
    marks = frozenset({"_weight_qdata"})

    def __init__(self, written: dict[str, Any], path: Path) -> None:
        self._rounded = _ROUNDED in str(written.get("quant_type"))

    def read(self, names: tuple[str, ...], tensors: Tensors, shape: tuple[int, int] | None) -> Weights:
        for leaf in ("_weight_scale_and_zero", "_weight_per_tensor_scale", "_weight_act_pre_scale"):
            if leaf in tensors:
                raise Unreadable(leaf, "is of an unsupported format; int8 and float8 are supported")
        held = taken(tensors, "_weight_qdata", lambda dtype: dtype in (torch.int8, *_FLOATS), "int8 or float8", 2)
        scale = floats_of(tensors, "_weight_scale")
        outputs, inputs = held.shape
        rows, columns = scale.shape
        if not rows or not columns or outputs % rows or inputs % columns:
            raise Unreadable(
                "_weight_scale", f"is {list(scale.shape)}, which does not divide {outputs} x {inputs} into blocks"
            )
        zero = tensors.get("_weight_zero_point")
        if zero is not None and zero.shape != scale.shape:
            raise Unreadable("_weight_zero_point", f"is {list(zero.shape)}, its scale {list(scale.shape)}")
        if zero is not None and not zero.count_nonzero():
            zero = None
        if held.dtype in _FLOATS or (zero is None and columns == 1):
            return Scaled(held, scale, (outputs // rows, inputs // columns), self._rounded)
        least, most = (int(end) for end in held.aminmax()) if held.numel() else (0, 0)
        bits = 4 if least >= -8 and most < 8 else 8
        half = 2 ** (bits - 1)
        each = outputs // rows
        zeros = torch.zeros_like(scale) if zero is None else zero.to(scale.dtype)
        return Grouped(
            (held.int() + half).to(torch.uint8),
            scale.repeat_interleave(each, 0),
            (zeros + half).repeat_interleave(each, 0),
            bits,
            in_order(inputs, inputs // columns, held.device),
        )
