"""CLIP's text encoders, one or several of them over the same prompt, as one stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from segue.engines.contract import LoadContext
from segue.models.diffusion.loading import load_encoder
from segue.models.diffusion.text_encoder import TextEncoder


class ClipEncoder(TextEncoder):
    """`ModuleAdapter`. An item has one list of token ids per encoder, each padded to that encoder's length; what comes
    of it: `embeds` [tokens, hidden], the hidden states before the last layer, and `pooled` [features], those of the
    end token (projected, where the encoder has a projection); of several encoders beside each other."""

    names: ClassVar[tuple[str, ...]] = ("embeds", "pooled")
    components: ClassVar[tuple[str, ...]] = ("text_encoder",)

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self.networks = torch.nn.ModuleList([load_encoder(ctx, name) for name in self.components])

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        embeds, pooled = [], []
        for place, network in enumerate(self.networks):
            ids = torch.tensor([item[place] for item in items], device=self.device)
            made = network(input_ids=ids, output_hidden_states="embeds" in self.names)
            if "embeds" in self.names:
                embeds.append(made.hidden_states[-2])
            pooled.append(made.text_embeds if "text_embeds" in made else made.pooler_output)
        both = {"pooled": torch.cat(pooled, dim=-1)}
        if embeds:
            both["embeds"] = torch.cat(embeds, dim=-1)
        return [{name: tensor[row] for name, tensor in both.items()} for row in range(len(items))]


class PooledClipEncoder(ClipEncoder):
    """`ModuleAdapter`; `pooled` alone."""

    names = ("pooled",)
