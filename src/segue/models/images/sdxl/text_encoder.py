"""The text encoders: CLIP's hidden states before its last layer; from the second also its pooled projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import CLIPTextModelWithProjection

from segue.engines.contract import LoadContext
from segue.models.shared.diffusion.loading import load_encoder
from segue.models.shared.diffusion.text_encoder import TextEncoder


class ClipEncoder(TextEncoder):
    """`ModuleModel` of either encoder; the stage's name is the folder's. An item: `{"ids": [int, …], "skip": int}`, the
    ids padded to CLIP's length; `embeds`: [tokens, hidden], `pooled`: [dimension], empty for the first encoder."""

    names = ("embeds", "pooled")

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self._network = load_encoder(ctx, ctx.stage)
        self._pools = isinstance(self._network, CLIPTextModelWithProjection)

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        ids = torch.tensor([item["ids"] for item in items], device=self.device)
        found = self._network(ids, output_hidden_states=True)
        pooled = found.text_embeds if self._pools else found.last_hidden_state.new_zeros(len(items), 0)
        return [
            {"embeds": found.hidden_states[-2 - item["skip"]][row], "pooled": pooled[row]}
            for row, item in enumerate(items)
        ]
