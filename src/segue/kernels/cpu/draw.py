"""Draws codes on a CPU in one pass over the logits of a row, where torch takes twenty operators."""

from __future__ import annotations

import struct

import torch

from segue.kernels.cpu.native import library

MOST_CODES = 8192
"""The same in kernels.c."""


def draw_codes(
    logits: torch.Tensor,
    numbers: torch.Tensor,
    greedy: torch.Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `draw_codes` of `segue.kernels.operations`; logits are float32, of at most `MOST_CODES` codes."""
    compiled = library()
    assert compiled is not None
    if (logits.dtype, numbers.dtype, greedy.dtype) != (torch.float32, torch.float64, torch.bool):
        raise RuntimeError(f"codes are drawn from {logits.dtype} by {numbers.dtype} and {greedy.dtype}")
    rows, width = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    codes = torch.empty(rows, dtype=torch.long)
    finite = torch.empty(rows, dtype=torch.bool)
    [share] = struct.unpack("<q", struct.pack("<d", top_p))
    compiled.draw(
        *(compiled.number, logits.data_ptr(), logits.stride(0), numbers.data_ptr(), numbers.stride(0)),
        *(greedy.data_ptr(), greedy.stride(0), temperature, codes.data_ptr(), finite.data_ptr()),
        *(rows, width, top_k, share, torch.get_num_threads()),
    )
    return codes, finite
