"""Tolerances between two computations of the same result."""

from __future__ import annotations

import torch

_EXACT = {torch.float32: 1e-3, torch.float64: 1e-6}


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest absolute difference, relative to the largest absolute value of `theirs`."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def tolerance(dtype: torch.dtype) -> float:
    """The largest allowed relative difference between two computations in `dtype`."""
    return _EXACT.get(dtype, 0.1)
