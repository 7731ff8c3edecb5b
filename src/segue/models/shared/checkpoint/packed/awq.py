"""Read weights in AutoAWQ's format: 4 bits, with a scale and a zero point for each group of inputs.

`gemm`: `qweight` [inputs, outputs / 8] int32, `qzeros` [groups, outputs / 8], `scales` [groups, outputs]; a word holds
8 outputs, from the lowest bits on: outputs 0, 2, 4, 6, 1, 3, 5, 7. `gemv`: `qweight` [outputs, inputs / 8], `qzeros`
[outputs, width], `scales` [outputs, width * 8], all in order, the groups padded to whole words.
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
    in_order,
    must_be,
    same,
    words_of,
)
from segue.models.shared.checkpoint.packed.written import entry, one_of

VERSIONS = ("gemm", "gemv")
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of a word's outputs."""
_IN_WORD = 8


class Awq:
    """Raises `ConfigError` for a format outside `VERSIONS`, or other than 4 bits."""

    leaves = same("qweight", "qzeros", "scales")
    marks = frozenset({"qweight"})

    def __init__(self, written: dict[str, Any], path: Path) -> None:
        one_of(path, "bits", written.get("bits", written.get("w_bit", 4)), (4,))
        version = str(written.get("version") or written.get("format") or "gemm").lower()
        self._version = one_of(path, "version", version, VERSIONS)
        size = entry(path, written, "group_size", int, written.get("q_group_size", 128))
        self._size = size if size > 0 else None

    def read(self, names: tuple[str, ...], tensors: Tensors, shape: tuple[int, int] | None) -> Grouped:
        packed, zeros, scales = words_of(tensors, "qweight"), words_of(tensors, "qzeros"), floats_of(tensors, "scales")
        return self._gemm(packed, zeros, scales) if self._version == "gemm" else self._gemv(packed, zeros, scales)

    def _gemm(self, packed: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> Grouped:
        inputs, outputs = len(packed), packed.shape[1] * _IN_WORD
        groups = self._groups(inputs)
        must_be("scales", scales, (groups, outputs), f"of {inputs} inputs and {outputs} outputs")
        must_be("qzeros", zeros, (groups, outputs // _IN_WORD), f"of {inputs} inputs and {outputs} outputs")
        numbers, zero = (_in_order(unpacked(words, 4, outputs)) for words in (packed, zeros))
        return Grouped(numbers.T, scales.T, zero.T, 4, in_order(inputs, self._size or inputs, packed.device))

    def _gemv(self, packed: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> Grouped:
        outputs, inputs = len(packed), packed.shape[1] * _IN_WORD
        groups = self._groups(inputs)
        width = zeros.shape[1]
        if width * _IN_WORD < groups:
            raise Unreadable("qzeros", f"is {list(zeros.shape)}; {inputs} inputs have {groups} groups")
        must_be("qzeros", zeros, (outputs, width), f"of {outputs} outputs")
        must_be("scales", scales, (outputs, width * _IN_WORD), f"for zeros of {list(zeros.shape)}")
        numbers, zero = unpacked(packed, 4, inputs), unpacked(zeros, 4, groups)
        return Grouped(numbers, scales[:, :groups], zero, 4, in_order(inputs, self._size or inputs, packed.device))

    def _groups(self, inputs: int) -> int:
        size = self._size or inputs
        if inputs % size:
            raise Unreadable("qweight", f"has {inputs} inputs, not a multiple of the group size {size}")
        return inputs // size


def _in_order(numbers: torch.Tensor) -> torch.Tensor:
    """[rows, outputs] in a word's order → in natural order."""
    return numbers.unflatten(1, (-1, _IN_WORD))[:, :, list(_PLACES)].flatten(1)
