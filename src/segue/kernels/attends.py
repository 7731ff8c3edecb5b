"""What computes attention, whatever a step looks like to it."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from segue.kernels.form import Form

StepT = TypeVar("StepT", contravariant=True)


class Attends(Protocol[StepT]):
    """Writes a step's K and V to the store and attends to what its sequences see."""

    recordable: bool
    """It looks at no value on the host while it runs: steps of single queries can be played back (`decode_graphs`)."""
    widens: bool
    """It reads K and V that are stored in fewer bits than queries have."""
    mutual: bool
    """It does tokens that see each other in both directions (`Part.mutual`)."""
    page: int
    """The tokens of a block must be a multiple of this."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepT, form: Form
    ) -> torch.Tensor:
        """q [heads, tokens, head_dim], k [kv_heads, tokens, head_dim], v [kv_heads, tokens, value_dim] →
        [tokens, heads, value_dim]. `step` is that of the layer's group."""
