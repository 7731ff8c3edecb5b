"""The text encoder: Qwen2.5-VL's last hidden states of the templated prompt, without those of the template's head; of a
request with pictures to work on, it sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.kernels.linear import pack_linears
from segue.models.diffusion.loading import ENCODED_ROWS, load_component
from segue.models.diffusion.text_encoder import TextEncoder


class Encoder(TextEncoder):
    """`ModuleAdapter`; `embeds` of an item: [tokens, hidden]."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        # what is over the last hidden state, the head, goes
        self._network = load_component(ctx, "text_encoder").model
        pack_linears(self._network, ENCODED_ROWS)

    @torch.inference_mode()
    def warm_up(self) -> None:
        self.encode([{"ids": [0] * 64, "drop": 32, "most": 32}])

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        lengths = [len(item["ids"]) for item in items]
        ids, mask = self.padded([item["ids"] for item in items])
        seen = {}
        if pictures := [item for item in items if "pixels" in item]:
            seen["pixel_values"] = torch.cat([item["pixels"] for item in pictures]).to(self.device, self.dtype)
            seen["image_grid_thw"] = torch.cat([item["grid"] for item in pictures]).to(self.device)
        # positions count tokens, those of pictures as well: the library's pipelines do not name the kinds of tokens
        hidden = self._network(input_ids=ids, attention_mask=mask, use_cache=False, **seen).last_hidden_state
        return [
            {"embeds": hidden[row, item["drop"] : min(lengths[row], item["drop"] + item["most"])]}
            for row, item in enumerate(items)
        ]
