"""Load each stage's part of a MiMo-Audio checkpoint.

Names in published checkpoints (XiaomiMiMo/MiMo-Audio-7B-Instruct, MiMo-Audio-7B-Base): `model.*`, `lm_head`,
`speech_embeddings.*`, `input_local_transformer.*`, `local_transformer.*`, …; in MiMo-Audio-Tokenizer `encoder.*`, whose
quantizer the decoder uses, too, and `decoder.*`. Codebooks without a channel of the language model are not read, nor is
what only training needs.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from segue.engines.contract import LoadContext
from segue.models.shared.checkpoint.checkpoint import Checkpoint, load_module
from segue.models.speech.mimo_audio.codec import Decoder, Encoder
from segue.models.speech.mimo_audio.config import CODEC, Codec, Config
from segue.models.speech.mimo_audio.networks import LanguageNet

_BOOK = (r"^quantizer\.books\.(\d+)\.", r"encoder.quantizer.vq.layers.\1._codebook.")
_ENCODER_NAMES = (_BOOK, (r"^pool\.", "encoder.down_sample_layer.0."), (r"^pool_norm\.", "encoder.down_sample_norm."))
_DECODER_NAMES = (_BOOK, (r"^vocoder\.out\.", "decoder.vocoder.head.out."))

M = TypeVar("M", bound=nn.Module)


def language_name(name: str) -> str:
    """A parameter of `LanguageNet` → its published name."""
    return name.removeprefix("decoder.")


def encoder_name(name: str) -> str:
    """A parameter of `Encoder` → its published name."""
    return _renamed(name, _ENCODER_NAMES, "encoder.")


def decoder_name(name: str) -> str:
    """A parameter of `Decoder` → its published name."""
    return _renamed(name, _DECODER_NAMES, "decoder.")


def load_language_model(ctx: LoadContext, config: Config) -> LanguageNet:
    """Raises `ConfigError` with the missing tensor."""

    def located(name: str) -> Sequence[str]:
        return (language_name(name),)

    return load_module(
        ctx,
        lambda: LanguageNet(config),
        located,
        checkpoint=None if ctx.load_format == "dummy" else Checkpoint(ctx.model_dir),
        seed=zlib.crc32(b"llm"),
    )


def load_encoder(ctx: LoadContext, codec: Codec, config: Config) -> Encoder:
    """Always in float32. Raises `ConfigError` with the missing tensor."""
    return _load_codec(ctx, lambda: Encoder(codec, config.audio_channels), encoder_name)


def load_decoder(ctx: LoadContext, codec: Codec, config: Config) -> Decoder:
    """Always in float32. Raises `ConfigError` with the missing tensor."""
    return _load_codec(ctx, lambda: Decoder(codec, config.audio_channels), decoder_name)


def _load_codec(ctx: LoadContext, build: Callable[[], M], published: Callable[[str], str]) -> M:
    def located(name: str) -> Sequence[str]:
        return (published(name),)

    return load_module(
        ctx,
        build,
        located,
        checkpoint=None if ctx.load_format == "dummy" else Checkpoint(ctx.model_dir / CODEC),
        dtype=torch.float32,
        seed=zlib.crc32(published.__name__.encode()),
    )


def _renamed(name: str, rules: Sequence[tuple[str, str]], otherwise: str) -> str:
    for pattern, new in rules:
        renamed, count = re.subn(pattern, new, name)
        if count:
            return renamed
    return f"{otherwise}{name}"
