"""Cross-attention of a decoder to encoder states, as an attention function of `transformers`.

In an encoder-decoder, every decoder layer attends twice: to tokens, and to the encoder states of its request. Both
modules have the same layer number, so cross-attention has its own function, named in the config of its modules. It is
called with the rows of media that have no keys and values yet, and otherwise with no rows. The keys and values are
kept, and a token attends to those of its own request's media
(`segue.kernels.attention.cross_attention`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from segue.kernels.attention.cross_attention import CrossStep
from segue.messages.errors import ConfigError

NAME = "segue_encoder_rows"
"""The `attn_implementation` of modules that attend to encoder states."""


def encoder_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    across: CrossStep | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, tokens, dim], key and value [1, kv_heads, rows, dim] → ([1, tokens, heads, dim], None).

    Without `across`, as in the check at load, every token attends to all rows. Raises `ConfigError` for a mask.
    """
    if attention_mask is not None or dropout:
        raise ConfigError("attention to encoder states takes no mask and no dropout", field="architectures")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if across is None:
        shared = key.shape[1] != query.shape[1]
        mixed = scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=shared)
        return mixed.transpose(1, 2).contiguous(), None
    layer = module.layer_idx
    assert isinstance(layer, int)
    assert across.made is not None
    across.made(layer, key[0], value[0])
    return across.attend(layer, query[0], scale)[None], None


AttentionInterface.register(NAME, encoder_attention)
