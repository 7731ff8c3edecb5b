"""The text encoder: UMT5's last hidden states of the prompt, end token included."""

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
        self._network = load_encoder(ctx, "text_encoder")

    @torch.inference_mode()
    def warm_up(self) -> None:
        self.encode([{"ids": [0] * 64}])

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        texts = [item["ids"] for item in items]
        ids, mask = self.padded(texts)
        hidden = self._network(input_ids=ids, attention_mask=mask).last_hidden_state
        return [{"embeds": hidden[row, :length]} for row, length in enumerate(map(len, texts))]
