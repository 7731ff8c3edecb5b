"""Find and check the seams at which a transformers model accepts an attention implementation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from segue.messages.errors import ConfigError
from segue.models.shared.library import VERSION, PreTrainedModel


def cannot_be_served(kind: str, reason: str) -> ConfigError:
    """The error for a library model whose implementation Segue does not support."""
    return ConfigError(f"{kind} of transformers {VERSION} cannot be served: {reason}", field="architectures")


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The library's `get_decoder()`. If that contains the head too (Llama 4), the only model inside it; if the model
    names a layer of its head so (ModernBERT), the module below the head."""
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
    """Record the keyword arguments of each call of the module's forward."""
    seen: list[dict[str, Any]] = []
    hook = module.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def check_interface(model: PreTrainedModel, decoder: nn.Module, *, stateful: bool = False) -> None:
    """Raise `ConfigError` unless the model supports the library's attention interface from its decoder's forward down.
    `stateful`: it may do so without declaring it; the recorded attention calls of its layers will show it."""
    kind = type(model).__name__
    if not isinstance(decoder, PreTrainedModel) or not (decoder._supports_attention_backend or stateful):
        raise cannot_be_served(kind, "it does not support AttentionInterface")
    parameters = inspect.signature(decoder.forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise cannot_be_served(kind, "its decoder's forward passes no keyword arguments on to attention")
    check_takes(kind, frozenset(parameters), "inputs_embeds", "position_ids")


def check_takes(kind: str, parameters: frozenset[str], *names: str) -> None:
    """Raise `ConfigError` unless the decoder's forward has these parameters."""
    for name in names:
        if name not in parameters:
            raise cannot_be_served(kind, f"its decoder takes no {name}")
