"""The text encoder: Qwen2.5-VL's last hidden states of the templated prompt, without the template's head. When editing,
it also sees the request's images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.kernels.prepare import Plan, prepare
from segue.models.shared.diffusion.loading import ENCODED_ROWS, load_component
from segue.models.shared.diffusion.text_encoder import TextEncoder


class Encoder(TextEncoder):
    """`ModuleModel`; `embeds` of an item: [tokens, hidden]."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        # drop the head over the last hidden state
        self._network = load_component(ctx, "text_encoder").model
        prepare(self._network, ctx.device, Plan(rows=ENCODED_ROWS))

    @torch.inference_mode()
    def warm_up(self) -> None:
        self.encode([{"ids": [0] * 64, "drop": 32, "most": 32}])

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        lengths = [len(item["ids"]) for item in items]
        ids, mask = self.padded([item["ids"] for item in items])
        seen = {}
        if images := [item for item in items if "pixels" in item]:
            seen["pixel_values"] = torch.cat([item["pixels"] for item in images]).to(self.device, self.dtype)
            seen["image_grid_thw"] = torch.cat([item["grid"] for item in images]).to(self.device)
        # positions count all tokens, images' too: the library's pipelines pass no token types
        hidden = self._network(input_ids=ids, attention_mask=mask, use_cache=False, **seen).last_hidden_state
        return [
            {"embeds": hidden[row, item["drop"] : min(lengths[row], item["drop"] + item["most"])]}
            for row, item in enumerate(items)
        ]
