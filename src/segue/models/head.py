"""The head of a model of the library, without the decoder: what its own `forward` makes of hidden states."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from segue.models.library import ModelOutput, PreTrainedModel


def head_of(model: PreTrainedModel, inner: str, given: type[ModelOutput]) -> nn.Module:
    """`model` with its submodule `inner` (dotted), whose output its forward feeds to the head, handing its own input
    through, as a `given`; `model` stays as it is."""
    return _replaced(model, inner, _HandedThrough(given, model.get_submodule(inner)))


class _HandedThrough(nn.Module):
    """In the place of a decoder: its input is its output, of the class that the decoder's is."""

    def __init__(self, kind: type[ModelOutput], replaced: nn.Module) -> None:
        super().__init__()
        # numbers that the head reads of it (Falcon-H1's multiplier)
        self.__dict__.update({name: value for name, value in vars(replaced).items() if isinstance(value, int | float)})
        self._kind = kind

    def forward(self, input_ids: None = None, *, inputs_embeds: torch.Tensor, **others: Any) -> ModelOutput:
        """[1, rows, H] → the same, as the last hidden state."""
        return self._kind(last_hidden_state=inputs_embeds)


def _replaced(module: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """A module that shares everything with `module` but has `new` as its submodule `name` (dotted); `module` stays as
    it is."""
    first, _, rest = name.partition(".")
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    child = module.get_submodule(first)
    clone._modules[first] = _replaced(child, rest, new) if rest else new
    return clone
