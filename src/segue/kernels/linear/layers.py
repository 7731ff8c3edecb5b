"""Base classes of linear layers whose weights are not those of a plain `nn.Linear`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn


class PreparedLinear(nn.Module):
    """A linear layer whose weights were laid out, or are quantised."""

    in_features: int
    out_features: int
    hidden_bytes: int = 0
    """Memory of weights that torch does not see as tensors."""


class QuantizedLinear(PreparedLinear, ABC):
    """A linear layer with quantised weights."""

    rounds: ClassVar[bool] = False
    """It rounds its input as well."""

    @property
    @abstractmethod
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], dequantised; or an empty tensor of that dtype, which models read."""


def rounds(root: nn.Module) -> bool:
    """Whether a layer under `root` rounds its input."""
    return any(isinstance(module, QuantizedLinear) and module.rounds for module in root.modules())
