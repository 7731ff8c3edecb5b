"""The text encoder: Qwen3's hidden states before its last layer."""

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
        self.network = load_component(ctx, "text_encoder")

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        lengths = [len(item) for item in items]
        ids = torch.zeros(len(items), max(lengths), dtype=torch.long, device=self.device)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, : lengths[row]] = torch.tensor(item)
            mask[row, : lengths[row]] = 1
        made = self.network(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
        return [{"embeds": made.hidden_states[-2][row, :length]} for row, length in enumerate(lengths)]
