"""Parts of a model of transformers that sees or hears.

The library builds such a model as encoders, a text decoder, and one module (`inner`) that holds both: its forward
encodes the media, puts their rows in the places of placeholder tokens and calls the decoder. The `encoder` stage runs
`inner` without the decoder's layers; the `llm` stage runs the decoder alone.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.interface import cannot_be_served, decoder_of, name_of
from segue.models.library import VERSION, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from segue.models.multimodal_lm.graph import kinds_of
from segue.models.pretrained import load_config, load_model

DEEP_ARGUMENTS = frozenset(("visual_pos_masks", "deepstack_visual_embeds"))
"""How a decoder takes features for its first layers (Qwen3-VL)."""
RopeIndex = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@runtime_checkable
class PlacesMedia(Protocol):
    """A module whose media tokens stand in time, height and width (M-RoPE): the library has no class for them."""

    get_rope_index: RopeIndex


def load_whole(ctx: LoadContext, config: PreTrainedConfig) -> PreTrainedModel:
    """All of the model; of several ranks, this one's part, and the whole embedding: the leader alone puts prompts
    together."""
    if ctx.group is not None:
        _check_ranks(ctx)
    return load_model(ctx, config, AutoModelForMultimodalLM, whole_table=True)


def load_without_layers(ctx: LoadContext) -> PreTrainedModel:
    """The model without the layers of its text decoder: embedding, encoders and what joins them."""
    with _tables_of_nothing():
        return load_model(ctx, _without_layers(load_config(ctx)), AutoModelForMultimodalLM, emptied=True)


def empty_model(ctx: LoadContext) -> PreTrainedModel:
    """The model without any weights: for what its methods say of positions."""
    config = _without_layers(load_config(ctx))
    if type(config) not in AutoModelForMultimodalLM._model_mapping:
        raise ConfigError(
            f"transformers {VERSION} knows no such model of type {config.model_type!r}", field="architectures"
        )
    try:
        with torch.device("meta"), _tables_of_nothing():
            return AutoModelForMultimodalLM.from_config(config)
    except ImportError as error:  # an encoder of another package
        raise ConfigError(f"{config.model_type} cannot be loaded: {error}", field="architectures") from error


def media_tokens(ctx: LoadContext) -> dict[str, int]:
    """By kind of the media that the model has encoders for, the id in whose places it puts rows.

    Raises `ConfigError` where the config does not say.
    """
    config = load_config(ctx).to_dict()
    tokens = {}
    for kind in kinds_of(config):
        token = config.get(f"{kind}_token_id", config.get(f"{kind}_token_index"))
        if not isinstance(token, int):
            raise cannot_be_served(config["model_type"], f"its config names no token for {kind}")
        tokens[kind] = token
    return tokens


def inner_of(model: PreTrainedModel) -> str:
    """The dotted name of the module whose output the head takes: what holds encoders and decoder, or the decoder where
    the head is in there as well."""
    decoder = name_of(decoder_of(model), model)
    parent, _, _ = decoder.rpartition(".")
    head = model.get_output_embeddings()
    if not parent or any(module is head for module in model.get_submodule(parent).modules()):
        return decoder
    return parent


def holder_of(model: PreTrainedModel) -> nn.Module:
    """The module whose forward encodes media and calls the decoder."""
    holds = model.get_submodule(inner_of(model))
    return model if holds is decoder_of(model) else holds


def rope_index_of(model: PreTrainedModel) -> RopeIndex | None:
    """`get_rope_index` of the first module that has one; None: positions are 0, 1, 2, …"""
    for module in model.modules():
        if isinstance(module, PlacesMedia):
            return module.get_rope_index
    return None


def axes_of(model: PreTrainedModel, text: PreTrainedConfig) -> int:
    """Of positions: 1, or as many as M-RoPE cuts a head into (time, height and width where the config does not say)."""
    if rope_index_of(model) is None:
        return 1
    rope = text.rope_parameters if "rope_parameters" in text else None
    return len((rope or {}).get("mrope_section") or (1, 1, 1))


def layers_across(config: PreTrainedConfig) -> frozenset[int]:
    """The layers of the text decoder that look at media by cross-attention, and not at tokens."""
    text = config.get_text_config(decoder=True)
    return frozenset(text.cross_attention_layers if "cross_attention_layers" in text else ())


def taken_by(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """What of `given` a function names among its parameters."""
    names = inspect.signature(function).parameters.keys()
    return {name: value for name, value in given.items() if name in names}


def forget_embedding(model: PreTrainedModel) -> nn.Embedding:
    """Make every token's embedding NaN, in the memory of one number: what stands where a forward is over and is a
    number was put there for a medium."""
    embedding = model.get_input_embeddings()
    weight = embedding.weight
    empty = torch.full((1, 1), torch.nan, dtype=weight.dtype, device=weight.device)
    embedding.weight = nn.Parameter(empty.expand(weight.shape), requires_grad=False)
    return embedding


@contextmanager
def _tables_of_nothing() -> Iterator[None]:
    """torch says nothing of what a decoder without layers has for them: tensors without elements (Gemma 3n)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        yield


def _check_ranks(ctx: LoadContext) -> None:
    model = empty_model(ctx)
    if layers_across(load_config(ctx)):
        raise ConfigError(
            f"{type(model).__name__} cannot be run tensor parallel: its layers look at rows of pictures, which only "
            "the first rank is given; leave tensor_parallel out",
            field="tensor_parallel",
        )
    if taken_by(decoder_of(model).forward, dict.fromkeys(DEEP_ARGUMENTS)):
        raise ConfigError(
            f"{type(model).__name__} cannot be run tensor parallel: its media have features for the first layers as "
            "well, which only the first rank is given; leave tensor_parallel out",
            field="tensor_parallel",
        )


def _without_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 0
    # shared among them; tables of theirs
    text.update({name: 0 for name in ("num_kv_shared_layers", "hidden_size_per_layer_input") if name in text})
    if "layer_types" in text:
        text.layer_types = []
    return config
