"""Positions of a prompt's tokens: 0, 1, 2, … or, with M-RoPE, from the library's own `get_rope_index`."""

from __future__ import annotations

import torch

from segue.engines.contract import LoadContext
from segue.messages.errors import InvalidRequest
from segue.models.omni.multimodal_lm.loading import empty_model, rope_index_of, taken_by
from segue.models.omni.multimodal_lm.processor import Processed


class Positions:
    """Computes positions of prompts with media; needs no weights."""

    def __init__(self, ctx: LoadContext) -> None:
        self._rope_index = rope_index_of(empty_model(ctx))

    def __call__(self, processed: Processed) -> tuple[torch.Tensor, int] | None:
        """([axes, T] long, delta: token T + i has position T + i + delta on all axes); None for plain positions.

        Raises `InvalidRequest` if placeholders and media do not match.
        """
        if self._rope_index is None:
            return None
        assert processed.token_types is not None, "all processors of models with M-RoPE return them"
        ids = torch.tensor([processed.ids]).clamp(min=0)  # rows without an id are text
        given = {key: value for tensors in processed.tensors.values() for key, value in tensors.items()}
        given |= {"mm_token_type_ids": torch.tensor([processed.token_types]), "attention_mask": torch.ones_like(ids)}
        try:
            positions, delta = self._rope_index(ids, **taken_by(self._rope_index, given))
        except (IndexError, ValueError, RuntimeError, TypeError, StopIteration) as error:
            raise InvalidRequest(
                f"the prompt's placeholder tokens do not match its media ({error})", field="messages"
            ) from error
        return positions[:, 0], int(delta.flatten()[0])
