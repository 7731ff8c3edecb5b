"""Support decoders whose layers each take an embedding of the token ids in addition to the rows (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from segue.models.shared.library import PreTrainedConfig

LayerInputs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""ids [1, tokens] and rows [1, tokens, H] → `per_layer_inputs` [1, tokens, layers, width] of the decoder's forward."""


@runtime_checkable
class _MakesLayerInputs(Protocol):
    def get_per_layer_inputs(self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None) -> torch.Tensor:
        """Some implementations take ids alone."""
        ...


READ_AS: Mapping[int, int] = MappingProxyType({})
"""No id is replaced."""


def takes_ids_again(
    decoder: nn.Module, config: PreTrainedConfig, read_as: Mapping[int, int] = READ_AS
) -> LayerInputs | None:
    """A function that computes the decoder's per-layer inputs, or None if the decoder takes none. `read_as`: id of a
    medium's token → the id that layers see in its place."""
    taken = "per_layer_inputs" in inspect.signature(decoder.forward).parameters
    wide = "hidden_size_per_layer_input" in config and config.hidden_size_per_layer_input
    if not (isinstance(decoder, _MakesLayerInputs) and taken and wide):
        return None
    made = decoder.get_per_layer_inputs
    whole = "inputs_embeds" in inspect.signature(made).parameters

    def of_layers(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for token, other in read_as.items():
            ids = ids.masked_fill(ids == token, other)
        return made(ids, rows) if whole else made(ids)

    return of_layers
