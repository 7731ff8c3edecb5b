"""Load each stage's part of a Higgs Audio v2 checkpoint.

The language model is in the checkpoint's folder, as published. Its codec is a checkpoint of its own
(bosonai/higgs-audio-v2-tokenizer), which `processor_config.json` names: Segue reads it from the folder
`audio_tokenizer` within the checkpoint.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint import pretrained
from segue.models.shared.checkpoint.checkpoint import Checkpoint, load_module
from segue.models.shared.checkpoint.pretrained import load_part
from segue.models.speech.higgs_audio_v2.library import (
    DacDecoder,
    HiggsAudioV2Config,
    HiggsAudioV2ForConditionalGeneration,
    HiggsAudioV2Model,
    HiggsAudioV2TokenizerConfig,
    XcodecEuclideanCodebook,
    XcodecModel,
    XcodecResidualVectorQuantization,
)

CODEC = "audio_tokenizer"
"""The codec's folder."""
SPECIAL = 2
"""Codes of a codebook that the codec does not have: the beginning and the end of the stream."""


class TwoPaths(HiggsAudioV2Model):
    """The library's decoder. Its caller says which rows are audio: they take the audio layers, others those of text."""

    def get_placeholder_mask(
        self, input_ids: Tensor | None, inputs_embeds: Tensor, audio_input_ids_mask: Tensor | None
    ) -> Tensor | None:
        """`audio_input_ids_mask` [1, tokens] bool as it is; None: all rows are audio."""
        return audio_input_ids_mask


class LanguageModel(HiggsAudioV2ForConditionalGeneration):
    """The library's model over `TwoPaths`."""

    def __init__(self, config: HiggsAudioV2Config) -> None:
        super().__init__(config)
        self.model = TwoPaths(config)


class Quantizer(nn.Module):
    """A codebook of the codec with its projection: codes [B, n] → [B, width, n]."""

    def __init__(self, config: HiggsAudioV2TokenizerConfig) -> None:
        super().__init__()
        self.codebook = XcodecEuclideanCodebook(config)
        self.project_out = nn.Linear(config.codebook_dim, config.hidden_size)

    def decode(self, codes: Tensor) -> Tensor:
        return self.project_out(self.codebook.decode(codes)).transpose(1, 2)


class DecoderHalf(nn.Module):
    """The modules of the codec that decode, under its own names: codes [B, K, n] → samples [B, t]."""

    def __init__(self, config: HiggsAudioV2TokenizerConfig) -> None:
        super().__init__()
        self.quantizer: Any = XcodecResidualVectorQuantization(config)
        self.quantizer.quantizers = nn.ModuleList(Quantizer(config) for _ in range(config.num_quantizers))
        self.fc2 = nn.Linear(config.hidden_size, config.acoustic_model_config.hidden_size)
        self.acoustic_decoder = DacDecoder(config.acoustic_model_config)
        XcodecModel._adjust_dac_decoder(self.acoustic_decoder)

    def forward(self, codes: Tensor) -> Tensor:
        quantized = self.quantizer.decode(codes.transpose(0, 1))
        samples: Tensor = self.acoustic_decoder(self.fc2(quantized.transpose(1, 2)).transpose(1, 2))
        return samples[:, 0]


def load_config(ctx: LoadContext) -> HiggsAudioV2Config:
    """The checkpoint's config. Raises `ConfigError` naming the file."""
    config = pretrained.load_config(ctx)
    path = ctx.model_dir / "config.json"
    if not isinstance(config, HiggsAudioV2Config):
        raise ConfigError(
            f"{path}: model_type is {config.model_type!r}; that of Higgs Audio v2 is 'higgs_audio_v2'", field="model"
        )
    special = {config.audio_stream_bos_id, config.audio_stream_eos_id}
    if special != {config.codebook_size - SPECIAL, config.codebook_size - SPECIAL + 1}:
        raise ConfigError(
            f"{path}: audio_stream_bos_id and audio_stream_eos_id are {sorted(special)}; they must be the last "
            f"{SPECIAL} of the {config.codebook_size} codes (codebook_size)",
            field="model",
        )
    return config


def load_language_model(ctx: AutoregressiveContext, config: HiggsAudioV2Config) -> LanguageModel:
    """Raises `ConfigError`."""
    return cast(LanguageModel, load_part(ctx, config, config, LanguageModel, ""))


def load_codec_config(model_dir: Path, config: HiggsAudioV2Config) -> HiggsAudioV2TokenizerConfig:
    """The codec's config. Raises `ConfigError` if it is not there or does not fit the language model."""
    path = model_dir / CODEC / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{path}: not there; put the codec's checkpoint, which processor_config.json names as "
            f"audio_tokenizer_name_or_path, into the folder {CODEC!r} of this checkpoint",
            field="model",
        )
    try:
        codec = HiggsAudioV2TokenizerConfig.from_pretrained(path.parent)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ConfigError(f"{path}: {error}", field="model") from error
    for name, one, other in (
        ("num_quantizers", codec.num_quantizers, config.num_codebooks),
        ("codebook_size", codec.codebook_size, config.codebook_size - SPECIAL),
    ):
        if one != other:
            raise ConfigError(f"{path}: {name} is {one}, but the language model makes {other}", field="model")
    return codec


def load_codec(ctx: LoadContext, codec: HiggsAudioV2TokenizerConfig) -> DecoderHalf:
    """The decoder of the codec, always float32. Raises `ConfigError` with the missing tensor."""
    return load_module(
        ctx,
        lambda: DecoderHalf(codec),
        lambda name: (name,),
        checkpoint=None if ctx.load_format == "dummy" else Checkpoint(ctx.model_dir / CODEC),
        dtype=torch.float32,
        seed=zlib.crc32(b"vocoder"),
    )
