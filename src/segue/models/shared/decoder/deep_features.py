"""Deep features: rows of the vision encoder's inner layers that a decoder adds after its first layers, at media tokens.

T prompt tokens, L layers that get features, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from segue.engines.autoregressive.contract import FlatBatch, Prompt

DEEP = "deep"
"""`Prompt.extras`: [rows of media, L, H] in prompt order: features added after the first L layers."""
MEDIA = "media"
"""`Prompt.extras`: [T] bool, true at media rows with features."""


def deep_features(batch: FlatBatch, embeds: torch.Tensor) -> dict[str, Any]:
    """Arguments of the decoder for the media rows in a batch (Qwen3-VL's names); empty without such rows."""
    own = [_own_rows(*part) for part in batch.prompts]
    features = [rows for _, rows in own if rows is not None]
    if not features:
        return {}
    masks = [
        torch.zeros(stop - start, dtype=torch.bool) if mask is None else mask
        for (mask, _), (_, start, stop) in zip(own, batch.prompts, strict=True)
    ]
    places = torch.cat(masks).to(embeds.device)
    deep = torch.cat(features).to(embeds.device)
    return {"visual_pos_masks": places[None], "deepstack_visual_embeds": list(deep.unbind(1))}


def _own_rows(prompt: Prompt | None, start: int, stop: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """For tokens [start, stop) of a sequence: which are media rows [stop - start], and their deep features."""
    media = None if prompt is None else prompt.extras.get(MEDIA)
    if prompt is None or media is None or not media[start:stop].any():
        return None, None
    mask = torch.zeros(stop - start, dtype=torch.bool)
    mask[: len(media[start:stop])] = media[start:stop]
    before = int(media[:start].sum())
    return mask, prompt.extras[DEEP][before : before + int(mask.sum())]
