"""Teach the model to see and to answer: pictures, clips and questions without either.

First the vision encoder alone learns to tell what lies under each of its tokens; then encoder and language model learn
to answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model.data.answers import KINDS, Answers, Sequences
from demo_model.data.cells import Cells, cells
from demo_model.data.prompts import FRAMES_PER_PATCH
from demo_model.data.scenes import COLOURS, DIRECTIONS, PLACES, SHAPES, painted
from demo_model.training.muon import inside
from demo_model.training.networks import language_model, seen, vision
from demo_model.training.steps import Part

_BALANCE = 0.01
"""Weight of the loss that keeps the experts evenly used (Switch Transformers, section 2.2)."""


def visible(branches: Tensor) -> Tensor:
    """[sequences, tokens] → bool [sequences, 1, tokens, tokens]: a token sees what all see and its own branch, up to
    itself."""
    same = (branches[:, :, None] == branches[:, None]) | (branches[:, None] == 0)
    return same.tril()[:, None]


def answer_loss(model: Any, batch: Answers, step: int, heard: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy of the answers' tokens. `heard`: what the audio encoder gives of spoken questions, in order."""
    config, text = model.config.thinker_config, language_model(model)
    rows = text.embed_tokens(batch.ids)
    deep, pads = None, None
    if batch.drawn is not None:
        frames = painted(batch.drawn)
        found = seen(model, frames.unflatten(0, (len(batch.ids), -1)))
        pads = (batch.ids == config.image_token_id) | (batch.ids == config.video_token_id)
        rows = rows.masked_scatter(pads[..., None], found.pooler_output.to(rows.dtype))
        deep = found.deepstack_features
    if heard is not None:
        rows = rows.masked_scatter((batch.ids == config.audio_token_id)[..., None], heard.to(rows.dtype))
    made = text(
        inputs_embeds=rows,
        position_ids=batch.positions,
        attention_mask=visible(batch.branches),
        visual_pos_masks=pads,
        deepstack_visual_embeds=deep,
        use_cache=False,
        output_router_logits=True,
    )
    logits = model.thinker.lm_head(made.last_hidden_state.flatten(0, 1).index_select(0, batch.asked)).float()
    loss = functional.cross_entropy(logits, batch.targets)
    right = (logits.argmax(-1) == batch.targets).float().mean()
    name = f"spoken {batch.kind}" if heard is not None else batch.kind
    return loss + _BALANCE * _unevenness(made.router_logits), {f"{name} loss": loss, f"{name} right": right}


def _unevenness(router_logits: Sequence[Tensor]) -> Tensor:
    """1 where each layer's experts get equal shares of the tokens, more where not."""
    found = []
    for logits in router_logits:
        shares = torch.softmax(logits, -1)
        chosen = functional.one_hot(shares.topk(2, -1).indices, logits.shape[-1]).float().sum(1).mean(0) / 2
        found.append(logits.shape[-1] * (chosen * shares.mean(0)).sum())
    return torch.stack(found).mean()


# the vision encoder alone


class Labels(nn.Module):
    """Tells from a token's features whether a thing's centre is there, and which one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sorts = {"colour": 1 + len(COLOURS), "shape": len(SHAPES), "size": 2, "movement": 1 + len(DIRECTIONS)}
        self.sorts["place"] = len(PLACES)
        self.head = nn.Linear(width, sum(self.sorts.values()))

    def loss(self, features: Tensor, things: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses, values = [], {}
        each = self.head(features).float().split(list(self.sorts.values()), -1)
        for name, logits, wanted in zip(self.sorts, each, things.unbind(-1), strict=True):
            losses.append(functional.cross_entropy(logits, wanted))
            known = (wanted > 0) if name == "colour" else wanted >= 0
            values[f"{name} right"] = ((logits.argmax(-1) == wanted) & known).sum() / known.sum()
        return torch.stack(losses).sum(), values


def encoder_part(model: Any, *, size: int = 96) -> Part:
    """Trains the vision encoder."""
    labels = Labels(model.config.thinker_config.vision_config.out_hidden_size)

    def loss(batch: Cells, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        frames = painted(batch.drawn)
        pairs = frames[:, None] if step % 4 < 3 else frames.unflatten(0, (-1, FRAMES_PER_PATCH))
        return labels.loss(seen(model, pairs).pooler_output, batch.things)

    return Part(
        "vision",
        [vision(model)],
        partial(cells, size=size),
        loss,
        own=labels,
        rate=2e-3,
        slow=[vision(model).patch_embed],
        matrices=inside(vision(model).blocks, vision(model).merger, vision(model).merger_list)[0],
        matrix_rate=0.005,
    )


def answers_part(model: Any, model_dir: Path, *, size: int = 32, questions: int = 8) -> Part:
    """Trains the language model, and the vision encoder slowly: at first it would only lose what it has learned."""
    text = read_as_drawn(model)
    matrices, stacks = inside(text.layers)
    return Part(
        "answers",
        [vision(model), text, model.thinker.lm_head],
        Sequences(model_dir, size, KINDS, questions),
        partial(answer_loss, model),
        rate=1.5e-3,
        slow=[vision(model)],
        matrices=matrices,
        stacks=stacks,
        matrix_rate=0.004,
    )


def read_as_drawn(model: Any) -> Any:
    """The language model, whose embeddings of tokens stay what `create` has drawn: audio encoder and talker learn from
    them at the same time."""
    text = language_model(model)
    text.embed_tokens.requires_grad_(False)
    return text
