"""What a layer asks of attention."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Form(NamedTuple):
    """What a layer asks of attention, besides being causal."""

    scaling: float
    window: int | None = None
    """A query sees this many keys, itself included (Mistral, §2.1)."""
    softcap: float | None = None
    """Scores are `softcap * tanh(scores / softcap)` (Gemma 2, §2)."""
    sinks: torch.Tensor | None = None
    """[heads]: one more logit per head in the softmax, with no value (gpt-oss)."""

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None
