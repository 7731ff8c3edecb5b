"""The text encoder: Qwen3's hidden states before its last layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.models.shared.diffusion.loading import load_encoder
from segue.models.shared.diffusion.text_encoder import TextEncoder


class Encoder(TextEncoder):
    """`ModuleModel`; `embeds` of an item: [tokens, hidden]."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self.network = load_encoder(ctx, "text_encoder")

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        ids, mask = self.padded(items)
        made = self.network(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
        return [{"embeds": made.hidden_states[-2][row, :length]} for row, length in enumerate(map(len, items))]
