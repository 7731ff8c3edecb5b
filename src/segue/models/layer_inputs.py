"""Decoders whose layers take an embedding of the token ids each, besides the rows (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from segue.models.library import PreTrainedConfig

LayerInputs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""ids [1, tokens] and rows [1, tokens, H] → `per_layer_inputs` [1, tokens, layers, width] of the decoder's forward."""


def takes_ids_again(decoder: nn.Module, config: PreTrainedConfig) -> LayerInputs | None:
    """The decoder's own method for it; None for decoders that take nothing of the kind."""
    made: Any = getattr(decoder, "get_per_layer_inputs", None)
    taken = "per_layer_inputs" in inspect.signature(decoder.forward).parameters
    if made is None or not taken or not getattr(config, "hidden_size_per_layer_input", 0):
        return None
    if "inputs_embeds" not in inspect.signature(made).parameters:
        return lambda ids, rows: made(ids)
    return lambda ids, rows: made(ids, rows)
