"""Positions of a prompt's tokens: 0, 1, 2, … or, with M-RoPE, from the library's own `get_rope_index`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.messages.errors import InvalidRequest
from segue.models.omni.multimodal_lm.loading import empty_model, rope_index_of, taken_by
from segue.models.omni.multimodal_lm.processor import Processed


class Positions:
    """Computes positions of prompts with media; needs no weights."""

    def __init__(self, ctx: LoadContext) -> None:
        self._rope_index = rope_index_of(empty_model(ctx))

    def __call__(self, ids: list[int], media: Sequence[tuple[int, Processed]]) -> tuple[torch.Tensor, int] | None:
        """([axes, T] long, delta: token T + i has position T + i + delta on all axes); None for plain positions.

        `media`: the place of the first token of each part of the prompt that has media, and that part; all other tokens
        are text. Raises `InvalidRequest` if placeholders and media do not match.
        """
        if self._rope_index is None:
            return None
        whole = torch.tensor([ids]).clamp(min=0)  # rows without an id are text
        types = torch.zeros_like(whole)
        given: dict[str, Any] = {}
        for start, part in media:
            assert part.token_types is not None, "all processors of models with M-RoPE return them"
            types[0, start : start + len(part.ids)] = torch.tensor(part.token_types)
            for tensors in part.tensors.values():
                for key, value in taken_by(self._rope_index, tensors).items():
                    given[key] = torch.cat([given[key], value]) if key in given else value
        given |= {"mm_token_type_ids": types, "attention_mask": torch.ones_like(whole)}
        try:
            positions, delta = self._rope_index(whole, **taken_by(self._rope_index, given))
        except (IndexError, ValueError, RuntimeError, TypeError, StopIteration) as error:
            raise InvalidRequest(
                f"the prompt's placeholder tokens do not match its media ({error})", field="messages"
            ) from error
        return positions[:, 0], int(delta.flatten()[0])
