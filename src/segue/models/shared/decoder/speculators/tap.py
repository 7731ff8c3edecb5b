"""Capture hidden states inside a decoder while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Tap:
    """Keeps the inputs of some layers in the decoder's last forward (torch's forward hooks)."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._seen: list[torch.Tensor | None] = [None] * len(layers)
        for place, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._keep(place), with_kwargs=True)

    def _keep(self, place: int) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._seen[place] = given[0] if given else named["hidden_states"]

        return hook

    def rows(self) -> torch.Tensor:
        """[tokens, layers * hidden] of the last forward, in the order of the layers passed in."""
        seen = [rows for rows in self._seen if rows is not None]
        if len(seen) < len(self._seen):
            raise RuntimeError("a layer was run without its hook: compiled, or replayed from a captured graph")
        self._seen = [None] * len(seen)
        return torch.cat([rows[0] for rows in seen], dim=-1)
