"""Load each stage's part of a Qwen3-Omni checkpoint.

Names in published checkpoints (Qwen/Qwen3-Omni-30B-A3B-Instruct, -Thinking, -Captioner): `thinker.model.*` (decoder,
experts one by one), `thinker.lm_head`, `thinker.visual.*`, `thinker.audio_tower.*`, `talker.*`, `code2wav.*`. The
library's loader reads the thinker, because it joins the experts; the encoders are read tensor by tensor.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.omni.qwen3_omni.library import (
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeVisionEncoder,
)
from segue.models.shared.checkpoint import pretrained
from segue.models.shared.checkpoint.checkpoint import Checkpoint, load_module
from segue.models.shared.library import AutoModelForMultimodalLM


class Encoders(nn.Module):
    """The thinker's vision and audio encoders."""

    def __init__(self, config: Qwen3OmniMoeThinkerConfig) -> None:
        super().__init__()
        self.visual = Qwen3OmniMoeVisionEncoder(config.vision_config)
        self.audio_tower = Qwen3OmniMoeAudioEncoder(config.audio_config)


def load_config(ctx: LoadContext) -> Qwen3OmniMoeConfig:
    """The checkpoint's config. Raises `ConfigError` naming the file."""
    with _errors_only("transformers.modeling_rope_utils"):  # it warns of keys of the talker's published config
        config = pretrained.load_config(ctx)
    if not isinstance(config, Qwen3OmniMoeConfig):
        raise ConfigError(
            f"{ctx.model_dir / 'config.json'}: model_type is {config.model_type!r}; "
            f"Qwen3-Omni's is {Qwen3OmniMoeConfig.model_type!r}",
            field="model",
        )
    return config


def load_thinker(ctx: LoadContext, config: Qwen3OmniMoeConfig) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    """The library's thinker, encoders included. Raises `ConfigError`."""
    with _errors_only("transformers.modeling_utils"):  # it reports the talker's tensors as unexpected
        model = pretrained.load_model(ctx, config.thinker_config, AutoModelForMultimodalLM)
    return cast(Qwen3OmniMoeThinkerForConditionalGeneration, model)


def load_encoders(ctx: LoadContext, config: Qwen3OmniMoeConfig) -> Encoders:
    """The encoders alone. Raises `ConfigError` with the missing tensor."""
    return load_module(
        ctx,
        lambda: Encoders(config.thinker_config),
        lambda name: (f"thinker.{name}", f"thinker.model.{name}"),
        checkpoint=_checkpoint(ctx),
        seed=zlib.crc32(b"encoder"),
    )


def load_code2wav(ctx: LoadContext, config: Qwen3OmniMoeConfig) -> Qwen3OmniMoeCode2Wav:
    """The vocoder, always in float32. Raises `ConfigError` with the missing tensor."""
    return load_module(
        ctx,
        lambda: Qwen3OmniMoeCode2Wav(config.code2wav_config),
        lambda name: (f"code2wav.{name}",),
        checkpoint=_checkpoint(ctx),
        dtype=torch.float32,
        seed=zlib.crc32(b"vocoder"),
    )


def _checkpoint(ctx: LoadContext) -> Checkpoint | None:
    """The checkpoint's tensors, or None for random weights."""
    return None if ctx.load_format == "dummy" else Checkpoint(ctx.model_dir)


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    """Suppress one logger's warnings. (Its level is left alone: the library does more at a higher one.)"""
    logger = logging.getLogger(name)

    def severe(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(severe)
    try:
        yield
    finally:
        logger.removeFilter(severe)
