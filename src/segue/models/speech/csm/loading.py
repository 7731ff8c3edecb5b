"""Load each stage's part of a CSM checkpoint.

Names in published checkpoints (sesame/csm-1b): `backbone_model.*`, `depth_decoder.*`, `embed_text_tokens`, `lm_head`,
and `codec_model.*` in the flat layout of Mimi's own checkpoints, whose halves newer transformers nests. The library's
loader reads the language models, because it ties their embeddings; the codec is read tensor by tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint import pretrained
from segue.models.shared.checkpoint.checkpoint import Checkpoint, load_module
from segue.models.shared.checkpoint.pretrained import errors_only, load_part
from segue.models.shared.speech.seanet import check_causal
from segue.models.speech.csm.library import CsmConfig, CsmForConditionalGeneration, MimiConfig, MimiModel

_FLAT = {
    "encoder.encoder_seanet.": "encoder.",
    "encoder.encoder_transformer.": "encoder_transformer.",
    "encoder.downsample.": "downsample.",
    "decoder.decoder_seanet.": "decoder.",
    "decoder.decoder_transformer.": "decoder_transformer.",
    "decoder.upsample.": "upsample.",
}
"""Prefix of names in the codec's halves → in the flat layout."""


class LanguageModels(CsmForConditionalGeneration):
    """The library's model without its codec; its input embedding is that of text."""

    def __init__(self, config: CsmConfig) -> None:
        super().__init__(config)
        del self.codec_model

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_text_tokens


def load_config(ctx: LoadContext) -> CsmConfig:
    """The checkpoint's config. Raises `ConfigError` naming the file, and what does not fit together."""
    with errors_only("transformers.configuration_utils"):  # it warns that text ids exceed the vocabulary of codes
        config = pretrained.load_config(ctx)
    path = ctx.model_dir / "config.json"
    if not isinstance(config, CsmConfig):
        raise ConfigError(
            f"{path}: model_type is {config.model_type!r}; CSM's is {CsmConfig.model_type!r}", field="model"
        )
    codec = config.codec_config
    if not isinstance(codec, MimiConfig):
        raise ConfigError(f"{path}: codec_config is of type {codec.model_type!r}; it must be 'mimi'", field="model")
    depth = config.depth_decoder_config
    for name, one, other in (
        ("num_codebooks of depth_decoder_config", depth.num_codebooks, config.num_codebooks),
        ("vocab_size of depth_decoder_config", depth.vocab_size, config.vocab_size),
        ("num_quantizers of codec_config", codec.num_quantizers, config.num_codebooks),
    ):
        if one != other:
            raise ConfigError(f"{path}: {name} is {one}, but the backbone's is {other}", field="model")
    check_causal(codec, path, " of codec_config")
    if not isinstance(config.codebook_eos_token_id, int):
        raise ConfigError(
            f"{path}: codebook_eos_token_id is {config.codebook_eos_token_id!r}; it must be one code", field="model"
        )
    return config


def load_language_models(ctx: AutoregressiveContext, config: CsmConfig) -> LanguageModels:
    """Backbone and depth decoder. Raises `ConfigError`."""
    return cast(LanguageModels, load_part(ctx, config, config, LanguageModels, ""))


def load_decoder(ctx: LoadContext, config: CsmConfig) -> MimiModel:
    """The codec without its encoder, always in float32. Raises `ConfigError` with the missing tensor."""
    return _load_codec(ctx, config, ("encoder", "encoder_transformer", "downsample"), "vocoder")


def load_encoder(ctx: LoadContext, config: CsmConfig) -> MimiModel:
    """The codec without its decoder, always in float32. Raises `ConfigError` with the missing tensor."""
    return _load_codec(ctx, config, ("decoder", "decoder_transformer", "upsample"), "encoder")


def _load_codec(ctx: LoadContext, config: CsmConfig, without: Sequence[str], stage: str) -> MimiModel:
    dummy = ctx.load_format == "dummy"
    codec = load_module(
        ctx,
        _built(config, without),
        _names,
        checkpoint=None if dummy else Checkpoint(ctx.model_dir),
        dtype=torch.float32,
        seed=zlib.crc32(stage.encode()),
    )
    if dummy:
        for module in codec.modules():
            if hasattr(module, "cluster_usage"):  # it divides the codebook, and random weights leave it 0
                module.cluster_usage.fill_(1.0)
    return codec


def _built(config: CsmConfig, without: Sequence[str]) -> Callable[[], MimiModel]:
    def build() -> MimiModel:
        codec: Any = MimiModel(config.codec_config)
        for name in without:
            if name in codec._modules:
                codec._modules[name] = None
        return codec

    return build


def _names(name: str) -> Sequence[str]:
    nested = next((part for part in _FLAT if name.startswith(part)), "")
    flat = _FLAT.get(nested, "") + name.removeprefix(nested)
    return (f"codec_model.{flat}", f"codec_model.{name}")
