"""A VAE's encoder as a stage of its own: pictures of many requests in one call, each encoded once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch

from segue.models.diffusion.text_encoder import TextEncoder


class PictureEncoder(TextEncoder):
    """`ModuleAdapter`: `{"pictures": [tensor, …]}` in, `{"pictures": [{name: tensor}, …]}` out, final; cached as texts
    are."""

    key: ClassVar[str] = "pictures"
    names: ClassVar[tuple[str, ...]] = ("latents",)

    @abstractmethod
    def encode_alike(self, pictures: torch.Tensor) -> dict[str, torch.Tensor]:
        """One call of the network over pictures of one shape, [B, …]: by name, [B, …]."""

    def bucket(self, items: Sequence[Any]) -> Hashable:
        return tuple(sorted({tuple(item.shape) for item in items}))

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        made: dict[int, dict[str, torch.Tensor]] = {}
        for shape in dict.fromkeys(item.shape for item in items):
            places = [place for place, item in enumerate(items) if item.shape == shape]
            found = self.encode_alike(torch.stack([items[place] for place in places]).to(self.device))
            for row, place in enumerate(places):
                made[place] = {name: found[name][row] for name in self.names}
        return [made[place] for place in range(len(items))]
