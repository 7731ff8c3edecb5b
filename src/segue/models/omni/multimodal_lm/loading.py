"""Load parts of a multimodal model of transformers.

The library builds such a model as encoders, a text decoder, and one module (`inner`) that contains both: its forward
encodes the media, replaces the rows of placeholder tokens and calls the decoder. The `encoder` stage runs `inner`
without the decoder's layers; the `llm` stage runs the decoder alone.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.omni.multimodal_lm.graph import kinds_of
from segue.models.shared.checkpoint.pretrained import load_config, load_model
from segue.models.shared.decoder.interface import cannot_be_served, decoder_of, name_of
from segue.models.shared.library import VERSION, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

DEEP_ARGUMENTS = frozenset(("visual_pos_masks", "deepstack_visual_embeds"))
"""Decoder arguments for features of its first layers (Qwen3-VL)."""
RopeIndex = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@runtime_checkable
class PlacesMedia(Protocol):
    """A module whose media tokens have positions in time, height and width (M-RoPE): the library has no class for
    it."""

    get_rope_index: RopeIndex


def load_whole(ctx: AutoregressiveContext, config: PreTrainedConfig) -> PreTrainedModel:
    """Load the whole model. With several ranks: this rank's part, and the whole embedding, so that a rank assembles
    prompts without the others."""
    if ctx.group is not None:
        _check_ranks(ctx)
    return load_model(ctx, config, AutoModelForMultimodalLM, whole_table=True)


def load_without_layers(ctx: LoadContext) -> PreTrainedModel:
    """Load the model without the layers of its text decoder: embedding, encoders and their connecting modules."""
    with _tables_of_nothing():
        return load_model(ctx, _without_layers(load_config(ctx)), AutoModelForMultimodalLM, emptied=True)


def empty_model(ctx: LoadContext) -> PreTrainedModel:
    """The model without any weights, for its methods that compute positions."""
    config = _without_layers(load_config(ctx))
    if type(config) not in AutoModelForMultimodalLM._model_mapping:
        raise ConfigError(
            f"transformers {VERSION} has no such model of type {config.model_type!r}", field="architectures"
        )
    try:
        with torch.device("meta"), _tables_of_nothing():
            return AutoModelForMultimodalLM.from_config(config)
    except ImportError as error:  # an encoder from another package
        raise ConfigError(f"{config.model_type} cannot be loaded: {error}", field="architectures") from error


def media_tokens(ctx: LoadContext) -> dict[str, int]:
    """Kind of media → the placeholder id whose rows the model replaces, for all kinds with an encoder.

    Raises `ConfigError` if the config does not state it.
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
    """The dotted name of the module whose output feeds the head: it contains encoders and decoder; or it is the
    decoder, if that contains the head too."""
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
    """Number of position axes: 1, or the sections of M-RoPE (3, for time, height and width, if the config states
    none)."""
    if rope_index_of(model) is None:
        return 1
    rope = text.rope_parameters if "rope_parameters" in text else None
    return len((rope or {}).get("mrope_section") or (1, 1, 1))


def layers_across(config: PreTrainedConfig) -> frozenset[int]:
    """The text decoder's cross-attention layers, which attend to media and not to tokens."""
    text = config.get_text_config(decoder=True)
    return frozenset(text.cross_attention_layers if "cross_attention_layers" in text else ())


def taken_by(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The entries of `given` that a function has as parameters."""
    names = inspect.signature(function).parameters.keys()
    return {name: value for name, value in given.items() if name in names}


def forget_embedding(model: PreTrainedModel) -> nn.Embedding:
    """Make every token's embedding NaN, using the memory of one number: after a forward, each value that is not NaN
    belongs to a medium."""
    embedding = model.get_input_embeddings()
    weight = embedding.weight
    empty = torch.full((1, 1), torch.nan, dtype=weight.dtype, device=weight.device)
    embedding.weight = nn.Parameter(empty.expand(weight.shape), requires_grad=False)
    return embedding


@contextmanager
def _tables_of_nothing() -> Iterator[None]:
    """Suppress torch's warning about the empty tensors of a decoder without layers (Gemma 3n)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        yield


def _check_ranks(ctx: LoadContext) -> None:
    if layers_across(load_config(ctx)):
        raise ConfigError(
            f"{type(empty_model(ctx)).__name__} cannot be run tensor parallel: its layers attend to image rows, which "
            "only the first rank has; leave tensor_parallel out",
            field="tensor_parallel",
        )


def _without_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 0
    # settings that refer to the removed layers: KV sharing, and per-layer tables
    text.update({name: 0 for name in ("num_kv_shared_layers", "hidden_size_per_layer_input") if name in text})
    if "layer_types" in text:
        text.layer_types = []
    return config
