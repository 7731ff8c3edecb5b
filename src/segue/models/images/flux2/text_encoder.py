"""The text encoder: concatenated hidden states of three layers of a language model, Mistral 3 or Qwen 3."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.images.flux2.prompts import KLEIN, LAYERS
from segue.models.shared.diffusion.loading import load_component, pipeline_index
from segue.models.shared.diffusion.text_encoder import TextEncoder


class Encoder(TextEncoder):
    """`ModuleModel`; `embeds` of an item: [tokens, 3 hidden], padding included."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        kind = pipeline_index(ctx.model_dir)["_class_name"]
        self._layers = LAYERS[kind]
        network = load_component(ctx, "text_encoder").model
        # drop the vision encoder and the heads
        self._network = network if kind == KLEIN else network.language_model
        if len(self._network.layers) < max(self._layers):
            raise ConfigError(
                f"{ctx.model_dir / 'text_encoder'}: has {len(self._network.layers)} layers; the denoiser reads the "
                f"hidden states after layers {self._layers}",
                field="model",
            )

    @torch.inference_mode()
    def warm_up(self) -> None:
        self.encode([{"ids": [0] * 64, "mask": [1] * 64}])

    def bucket(self, items: Sequence[Any]) -> Hashable:
        return tuple(sorted({len(item["ids"]) for item in items}))

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        """Items of one length share a call, because the network's positions count padding."""
        made: dict[int, dict[str, torch.Tensor]] = {}
        for length in dict.fromkeys(len(item["ids"]) for item in items):
            places = [place for place, item in enumerate(items) if len(item["ids"]) == length]
            ids, mask = (
                torch.tensor([items[place][name] for place in places], device=self.device) for name in ("ids", "mask")
            )
            states = self._network(
                input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=True
            ).hidden_states
            embeds = torch.cat([states[layer] for layer in self._layers], dim=-1)
            made.update((place, {"embeds": one}) for place, one in zip(places, embeds, strict=True))
        return [made[place] for place in range(len(items))]
