"""What a layer asks of attention."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Form(NamedTuple):
    """What a layer asks of attention, besides being causal."""

    scaling: float
    window: int | None = None
    """A query sees this many keys, itself included (Beltagy et al., 2020, §3.1)."""
    softcap: float | None = None
    """Scores are `softcap * tanh(scores / softcap)` (Bello et al., 2017)."""
    sinks: torch.Tensor | None = None
    """[heads]: one more logit per head in the softmax, with no value."""

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None
