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
from copy import deepcopy
from typing import cast

import torch
from torch import nn

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.omni.qwen3_omni.library import (
    PreTrainedModel,
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeTalkerForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeVisionEncoder,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from segue.models.shared.checkpoint import pretrained
from segue.models.shared.checkpoint.checkpoint import Checkpoint, load_module
from segue.models.shared.checkpoint.pretrained import load_part


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


def load_thinker(ctx: LoadContext, config: Qwen3OmniMoeConfig) -> PreTrainedModel:
    """The library's thinker without its encoders. Raises `ConfigError`."""
    part = deepcopy(config.thinker_config)
    part.vision_config.depth = part.audio_config.encoder_layers = 0  # so their layers are not read
    part.vision_config.deepstack_visual_indexes = []
    thinker = load_part(ctx, config, part, Qwen3OmniMoeThinkerForConditionalGeneration, "thinker.")
    for encoder in ("visual", "audio_tower"):
        for holder in (thinker, thinker.model):  # it is `model` in newer versions
            holder._modules.pop(encoder, None)
    return thinker


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


def load_talker(ctx: LoadContext, config: Qwen3OmniMoeConfig) -> Qwen3OmniMoeTalkerForConditionalGeneration:
    """The talker and its code predictor, which every rank has whole. Raises `ConfigError`."""
    _join_experts(config)
    plan: dict[str, str] = config.talker_config.text_config.base_model_tp_plan or {}
    model = load_part(
        ctx,
        config,
        config.talker_config,
        Qwen3OmniMoeTalkerForConditionalGeneration,
        "talker.",
        plan={f"model.{name}": style for name, style in plan.items()},
    )
    return cast(Qwen3OmniMoeTalkerForConditionalGeneration, model)


def _join_experts(config: Qwen3OmniMoeConfig) -> None:
    """Let the library join a talker's experts, which checkpoints store one by one; by itself it joins the thinker's."""
    kind = config.talker_config.model_type
    if get_checkpoint_conversion_mapping(kind) is None:
        known = get_checkpoint_conversion_mapping(config.thinker_config.model_type)
        register_checkpoint_conversion_mapping(kind, known)


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
