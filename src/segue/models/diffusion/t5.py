"""T5's encoder as the text encoder of a pipeline: a prompt is padded, and the padding is read like the rest."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch

from segue.engines.contract import LoadContext
from segue.models.diffusion.loading import load_encoder
from segue.models.diffusion.text_encoder import TextEncoder


class T5Encoder(TextEncoder):
    """`ModuleAdapter`. An item is a list of token ids, padded to the length that was asked for; `embeds` of it:
    [tokens, hidden]. There is no mask, as in the pipelines: only prompts of one length share a call."""

    component: ClassVar[str]

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self.network = load_encoder(ctx, self.component)

    def bucket(self, items: Sequence[Any]) -> Hashable:
        """All prompts of a request have one length."""
        return len(items[0])

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        made = self.network(input_ids=torch.tensor(list(items), device=self.device))
        return [{"embeds": embeds} for embeds in made.last_hidden_state]
