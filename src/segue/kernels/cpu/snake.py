"""Snake activations on a CPU in one pass, where torch takes four."""

from __future__ import annotations

import math

import torch

from segue.kernels.cpu.native import Library, library


def snake(
    x: torch.Tensor, frequencies: torch.Tensor, shares: torch.Tensor, compiled: Library | None = None
) -> torch.Tensor:
    """As `snake` of `segue.kernels.operations`; all are float32. `compiled`: the best instruction set by default."""
    compiled = compiled or library()
    assert compiled is not None
    channels, samples = x.shape[-2:]
    rows = x.reshape(math.prod(x.shape[:-2]), channels, samples)
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    frequencies, shares = frequencies.contiguous(), shares.contiguous()
    y = x.new_empty(x.shape)
    compiled.snake(
        *(compiled.number, rows.data_ptr(), rows.stride(0), rows.stride(1), frequencies.data_ptr()),
        *(shares.data_ptr(), y.data_ptr(), *rows.shape, torch.get_num_threads()),
    )
    return y
