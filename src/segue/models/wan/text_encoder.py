"""The text encoder: UMT5's last hidden states of the prompt, end token included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.models.diffusion.loading import load_component
from segue.models.diffusion.text_encoder import TextEncoder


class Encoder(TextEncoder):
    """`ModuleAdapter`; `embeds` of an item: [tokens, hidden]."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self._network = load_component(ctx, "text_encoder")

    @torch.inference_mode()
    def warm_up(self) -> None:
        self.encode([{"ids": [0] * 64}])

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        lengths = [len(item["ids"]) for item in items]
        ids = torch.zeros(len(items), max(lengths), dtype=torch.long, device=self.device)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, : lengths[row]] = torch.tensor(item["ids"])
            mask[row, : lengths[row]] = 1
        hidden = self._network(input_ids=ids, attention_mask=mask).last_hidden_state
        return [{"embeds": hidden[row, :length]} for row, length in enumerate(lengths)]
