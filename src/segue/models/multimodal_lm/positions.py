"""Where the tokens of a prompt stand: 0, 1, 2, … or, with M-RoPE, as the library's own `get_rope_index` says."""

from __future__ import annotations

import torch

from segue.engines.contract import LoadContext
from segue.messages.errors import InvalidRequest
from segue.models.multimodal_lm.loading import empty_model, rope_index_of, taken_by
from segue.models.multimodal_lm.processor import Processed


class Positions:
    """Positions of prompts with media; needs no weights."""

    def __init__(self, ctx: LoadContext) -> None:
        self._rope_index = rope_index_of(empty_model(ctx))

    def __call__(self, processed: Processed) -> tuple[torch.Tensor, int] | None:
        """([axes, T] long, delta: token T + i stands at T + i + delta on all axes); None for plain positions.

        Raises `InvalidRequest` where placeholders and media do not go together.
        """
        if self._rope_index is None:
            return None
        assert processed.token_types is not None, "made by all processors of models with M-RoPE"
        ids = torch.tensor([processed.ids])
        given = {key: value for tensors in processed.tensors.values() for key, value in tensors.items()}
        given |= {"mm_token_type_ids": torch.tensor([processed.token_types]), "attention_mask": torch.ones_like(ids)}
        try:
            positions, delta = self._rope_index(ids, **taken_by(self._rope_index, given))
        except (IndexError, ValueError, RuntimeError, TypeError, StopIteration) as error:
            raise InvalidRequest(
                f"the prompt's placeholder tokens do not go with its media ({error})", field="messages"
            ) from error
        return positions[:, 0], int(delta.flatten()[0])
