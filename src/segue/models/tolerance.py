"""How far apart what is computed in two ways may come out, where it is the same."""

from __future__ import annotations

import torch

_EXACT = {torch.float32: 1e-3, torch.float64: 1e-6}


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference over the largest number of theirs."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def tolerance(dtype: torch.dtype) -> float:
    """The largest difference between the same, computed in `dtype`."""
    return _EXACT.get(dtype, 0.1)
