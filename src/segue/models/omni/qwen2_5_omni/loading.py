"""Load each stage's part of a Qwen2.5-Omni checkpoint: built from its own config, with its own weights only.

Names in published checkpoints (Qwen/Qwen2.5-Omni-7B, -3B): `thinker.model.*` (decoder), `thinker.lm_head`,
`thinker.visual.*`, `thinker.audio_tower.*`, `talker.*`, `token2wav.*`. Newer transformers nests the first, third and
fourth (`thinker.model.language_model.*`, …) but saves and loads the published names; both are read. The language models
(thinker, talker) are loaded by the library, encoders and vocoder tensor by tensor.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.omni.qwen2_5_omni.family import DEFAULT_VOICE, SPEAKERS
from segue.models.omni.qwen2_5_omni.library import (
    PreTrainedModel,
    Qwen2_5OmniAudioEncoder,
    Qwen2_5OmniConfig,
    Qwen2_5OmniTalkerForConditionalGeneration,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniToken2WavModel,
    Qwen2_5OmniVisionEncoder,
)
from segue.models.shared.checkpoint import pretrained
from segue.models.shared.checkpoint.checkpoint import Checkpoint, Located, M, load_module
from segue.models.shared.checkpoint.pretrained import errors_only, load_part


class Encoders(nn.Module):
    """The thinker's vision and audio encoders."""

    def __init__(self, config: Qwen2_5OmniThinkerConfig) -> None:
        super().__init__()
        self.visual = Qwen2_5OmniVisionEncoder(config.vision_config)
        self.audio_tower = Qwen2_5OmniAudioEncoder(config.audio_config)


def _encoder_names(name: str) -> Sequence[str]:
    return (f"thinker.{name}", f"thinker.model.{name}")


def _vocoder_names(name: str) -> Sequence[str]:
    return (f"token2wav.{name}",)


@dataclass(frozen=True)
class Speaker:
    """One entry of `spk_dict.pt`."""

    bos_token: int
    """Text token that selects the speaker's voice in the talker."""
    cond: torch.Tensor
    """[1, enc_emb_dim] float32: speaker embedding, for the vocoder."""
    ref_mel: torch.Tensor
    """[1, frames, mel_dim] float32: mel spectrum of a sample of the voice, for the vocoder."""


def load_config(ctx: LoadContext) -> Qwen2_5OmniConfig:
    """The checkpoint's config. Raises `ConfigError` naming the file."""
    # the talker's config names ids of the thinker's vocabulary; the library warns that they exceed the talker's own
    with errors_only("transformers.configuration_utils"):
        return pretrained.load_config(ctx)


def open_checkpoint(ctx: LoadContext) -> Checkpoint | None:
    """The checkpoint's tensors, or None for random weights."""
    return None if ctx.load_format == "dummy" else Checkpoint(ctx.model_dir)


def load_encoders(ctx: LoadContext, config: Qwen2_5OmniConfig) -> Encoders:
    return _load(ctx, lambda: Encoders(config.thinker_config), _encoder_names, "encoder")


def load_thinker(ctx: LoadContext, config: Qwen2_5OmniConfig) -> PreTrainedModel:
    """The library's thinker without its encoders: decoder (`model.language_model`, in older versions `model`) and
    head."""
    part = deepcopy(config.thinker_config)
    part.vision_config.depth = part.audio_config.encoder_layers = 0  # so their layers are not read
    thinker = load_part(ctx, config, part, Qwen2_5OmniThinkerForConditionalGeneration, "thinker.")
    for holder in (thinker, thinker.model):  # it is `model` in newer versions
        for encoder in ("visual", "audio_tower"):
            holder._modules.pop(encoder, None)
    return thinker


def load_talker(ctx: LoadContext, config: Qwen2_5OmniConfig) -> PreTrainedModel:
    """The library's talker; its layers are the thinker's, for which alone the library has a tensor parallel plan."""
    plan: dict[str, str] = config.thinker_config.text_config.base_model_tp_plan or {}
    return load_part(
        ctx,
        config,
        config.talker_config,
        Qwen2_5OmniTalkerForConditionalGeneration,
        "talker.",
        plan={f"model.{name}": style for name, style in plan.items()},
    )


def load_token2wav(ctx: LoadContext, config: Qwen2_5OmniConfig | None = None) -> Qwen2_5OmniToken2WavModel:
    """The vocoder, always in float32, as in the reference."""
    whole = config or load_config(ctx)
    return _load(
        ctx, lambda: Qwen2_5OmniToken2WavModel(whole.token2wav_config), _vocoder_names, "vocoder", torch.float32
    )


def read_speakers(path: Path) -> dict[str, Any]:
    """What `spk_dict.pt` has for each voice, on the CPU; only tensors are unpickled. Raises `ConfigError`."""
    try:
        entries = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path}: cannot be read: {type(error).__name__}") from error
    if not isinstance(entries, dict):
        raise ConfigError(f"{path}: has a {type(entries).__name__}; it must be a dict of voices")
    return entries


def load_speakers(ctx: LoadContext, config: Qwen2_5OmniConfig) -> dict[str, Speaker]:
    """The voices of the checkpoint's `spk_dict.pt` (on the CPU), the default first.

    With random weights and no such file, returns one random voice of the right shape.
    """
    path = ctx.model_dir / SPEAKERS
    if ctx.load_format == "dummy" and not path.is_file():
        return {DEFAULT_VOICE: _random_speaker(config)}
    if not path.is_file():
        raise ConfigError(f"{path}: not there; a checkpoint that speaks has its voices in it")
    entries = read_speakers(path)
    try:
        speakers = {
            str(name): Speaker(int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float())
            for name, entry in entries.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not a dict of voices (bos_token, cond, ref_mel): {error!r}") from error
    if not speakers:
        raise ConfigError(f"{path}: names no voice")
    return dict(sorted(speakers.items(), key=lambda item: item[0] != DEFAULT_VOICE))


def _random_speaker(config: Qwen2_5OmniConfig) -> Speaker:
    dit = config.token2wav_config.dit_config
    generator = torch.Generator().manual_seed(_seed("speaker"))
    cond = torch.randn(1, dit.enc_emb_dim, generator=generator)
    ref_mel = torch.randn(1, 300, dit.mel_dim, generator=generator)
    return Speaker(config.talker_config.tts_text_start_token_id, cond, ref_mel)


def _load(
    ctx: LoadContext, build: Callable[[], M], located: Located, stage: str, dtype: torch.dtype | None = None
) -> M:
    return load_module(ctx, build, located, checkpoint=open_checkpoint(ctx), dtype=dtype, seed=_seed(stage))


def _seed(what: str) -> int:
    """A seed per part, so that parts do not draw the same noise."""
    return zlib.crc32(what.encode())
