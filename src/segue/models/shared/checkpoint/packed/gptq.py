"""Read weights in the format of GPTQ's tools (AutoGPTQ, GPTQModel, Optimum).

`qweight` [inputs * bits / 32, outputs] int32: a stream of bits along the inputs of each output. `qzeros` [groups,
outputs * bits / 32] int32: the same along the outputs. `scales` [groups, outputs]. `g_idx` [inputs]: the group of each
input (`desc_act`). The first version of the format stores zero points minus 1: whole words minus one in each number,
borrows included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from segue.models.shared.checkpoint.packed.bits import unpacked
from segue.models.shared.checkpoint.packed.weights import (
    Grouped,
    Tensors,
    Unreadable,
    floats_of,
    groups_of,
    in_order,
    must_be,
    same,
    words_of,
)
from segue.models.shared.checkpoint.packed.written import entry, one_of

BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")


class Gptq:
    """Raises `ConfigError` for a format outside `FORMATS`."""

    leaves = same("qweight", "qzeros", "scales", "g_idx")
    marks = frozenset({"qweight"})

    def __init__(self, written: dict[str, Any], path: Path) -> None:
        self._bits = one_of(path, "bits", entry(path, written, "bits", int), BITS)
        size = entry(path, written, "group_size", int, -1)
        self._size = size if size > 0 else None
        version = written.get("checkpoint_format") or written.get("format") or "gptq"
        self._less_one = one_of(path, "checkpoint_format", version, FORMATS) == "gptq"
        self._differ = bool(written.get("dynamic"))
        self._ordered = bool(written.get("desc_act"))

    def read(self, names: tuple[str, ...], tensors: Tensors, shape: tuple[int, int] | None) -> Grouped:
        packed, scales, packed_zeros = (
            words_of(tensors, "qweight"),
            floats_of(tensors, "scales"),
            words_of(tensors, "qzeros"),
        )
        groups, outputs = scales.shape
        bits, inputs = self._found(packed, tensors.get("g_idx"), shape)
        must_be("qweight", packed, (-(-inputs * bits // 32), outputs), f"of {inputs} inputs in {bits} bits")
        must_be("qzeros", packed_zeros, (groups, -(-outputs * bits // 32)), f"of {outputs} outputs in {bits} bits")
        order = tensors.get("g_idx")
        # all zeros despite several groups mean no order, as the kernels of the writing tools assumed
        if order is not None and (groups == 1 or order.numel() != inputs or bool(order.any())):
            group = groups_of(tensors, "g_idx", inputs, groups)
        elif order is None and self._ordered:
            raise Unreadable("g_idx", "is not in the checkpoint, but its config.json has desc_act")
        else:
            size = -(-inputs // groups) if self._differ else self._size or inputs
            if -(-inputs // size) != groups:
                raise Unreadable("scales", f"has {groups} groups; {inputs} inputs are {-(-inputs // size)} of {size}")
            group = in_order(inputs, size, packed.device)
        return Grouped(
            unpacked(packed.T, bits, inputs),
            scales.T,
            self._zeros(packed_zeros, bits, outputs).T,
            bits,
            group,
        )

    def _found(
        self, packed: torch.Tensor, group: torch.Tensor | None, shape: tuple[int, int] | None
    ) -> tuple[int, int]:
        """(bits, inputs), from the shapes: the bits may differ from layer to layer (GPTQModel's `dynamic`)."""
        words = len(packed) * 32
        inputs = shape[1] if shape is not None else words // self._bits if group is None else group.numel()
        if not self._differ:
            return self._bits, inputs
        bits = words // max(inputs, 1)
        if bits not in BITS:
            raise Unreadable("qweight", f"is {list(packed.shape)}; for {inputs} inputs that means {bits} bits")
        return bits, inputs

    def _zeros(self, packed: torch.Tensor, bits: int, outputs: int) -> torch.Tensor:
        """[groups, outputs]"""
        if not self._less_one:
            return unpacked(packed, bits, outputs)
        if bits == 3:
            return unpacked(packed, bits, outputs) + 1 & 7
        ones = sum(1 << place for place in range(0, 32, bits))
        return unpacked(packed + ones, bits, outputs)
