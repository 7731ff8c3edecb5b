"""Where a model of transformers takes attention from outside."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from segue.messages.errors import ConfigError
from segue.models.library import VERSION, PreTrainedModel


def cannot_be_served(kind: str, reason: str) -> ConfigError:
    """A model of the library that does something in a way of its own."""
    return ConfigError(f"{kind} of transformers {VERSION} cannot be served: {reason}", field="architectures")


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The library's `get_decoder()`; where the head is in there as well (Llama 4), the one model in it; where that is
    how the model calls a layer of its head (ModernBERT), what is under the head."""
    decoder: PreTrainedModel = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        base: PreTrainedModel = model.base_model
        return base
    inside = [child for child in decoder.children() if isinstance(child, PreTrainedModel)]
    head = model.get_output_embeddings()
    holds_head = head is not None and any(module is head for module in decoder.modules())
    return inside[0] if holds_head and len(inside) == 1 else decoder


def name_of(part: nn.Module, whole: nn.Module) -> str:
    """The dotted name of a submodule."""
    return next(name for name, module in whole.named_modules() if module is part)


@contextmanager
def seen_by(module: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """The keyword arguments that its forward is called with from now on, call by call."""
    seen: list[dict[str, Any]] = []
    hook = module.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def check_interface(model: PreTrainedModel, decoder: nn.Module, *, stateful: bool = False) -> None:
    """The model takes part in the library's attention interface, down from its decoder's forward. `stateful`: it may do
    so without saying it; what its layers give to attention shows it. Raises `ConfigError`."""
    kind = type(model).__name__
    if not isinstance(decoder, PreTrainedModel) or not (decoder._supports_attention_backend or stateful):
        raise cannot_be_served(kind, "it does not take attention from outside (AttentionInterface)")
    parameters = inspect.signature(decoder.forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise cannot_be_served(kind, "its decoder's forward passes no keyword arguments on to attention")
    check_takes(kind, frozenset(parameters), "inputs_embeds", "position_ids")


def check_takes(kind: str, parameters: frozenset[str], *names: str) -> None:
    """A decoder's forward has these parameters among its own. Raises `ConfigError`."""
    for name in names:
        if name not in parameters:
            raise cannot_be_served(kind, f"its decoder takes no {name}")
