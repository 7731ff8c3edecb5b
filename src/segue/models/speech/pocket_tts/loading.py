"""Load each stage's part of a Pocket TTS checkpoint.

A checkpoint is a directory with the language model's files. Its folder `audio_tokenizer` has the audio tokenizer's own
checkpoint, and `voices/NAME.safetensors` has a voice as `audio_prompt_latents` [frames, D] float32: the latents that
the audio tokenizer gives for a recording of it.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint import pretrained
from segue.models.shared.checkpoint.checkpoint import Checkpoint, load_module
from segue.models.shared.checkpoint.files import read_object
from segue.models.shared.speech.seanet import check_causal
from segue.models.speech.pocket_tts.library import (
    PocketTTSAudioTokenizerConfig,
    PocketTTSAudioTokenizerModel,
    PocketTTSConfig,
    PocketTTSForConditionalGeneration,
)

CODEC = "audio_tokenizer"
VOICES = "voices"
LATENTS = "audio_prompt_latents"


class SpokenModel(PocketTTSForConditionalGeneration):
    """The library's model without what only its training has."""

    def __init__(self, config: PocketTTSConfig) -> None:
        super().__init__(config)
        del self.loss_weighting, self.latent_stats_num_updates


def load_config(ctx: LoadContext) -> PocketTTSConfig:
    """The checkpoint's config. Raises `ConfigError` naming the file."""
    config = pretrained.load_config(ctx)
    if not isinstance(config, PocketTTSConfig):
        path = ctx.model_dir / "config.json"
        raise ConfigError(f"{path}: model_type is {config.model_type!r}; it must be 'pocket_tts'", field="model")
    return config


def load_model(ctx: AutoregressiveContext, config: PocketTTSConfig) -> SpokenModel:
    """Backbone, flow head and end-of-speech head. Raises `ConfigError`."""
    return cast(SpokenModel, pretrained.load_part(ctx, config, config, SpokenModel, ""))


def load_codec_config(model_dir: Path, config: PocketTTSConfig) -> PocketTTSAudioTokenizerConfig:
    """The audio tokenizer's config. Raises `ConfigError` if it is missing, does not fit, or cannot stream."""
    path = model_dir / CODEC / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: put the checkpoint of the model's audio tokenizer into {path.parent}", field="model"
        )
    codec = PocketTTSAudioTokenizerConfig(**read_object(path))
    if codec.latent_dim != config.latent_dim:
        raise ConfigError(
            f"{path}: latent_dim is {codec.latent_dim}, but the backbone's is {config.latent_dim}", field="model"
        )
    check_causal(codec, path)
    return codec


def load_decoder(ctx: LoadContext, codec: PocketTTSAudioTokenizerConfig) -> PocketTTSAudioTokenizerModel:
    """The audio tokenizer without its encoder, always in float32. Raises `ConfigError` with the missing tensor."""
    codec.encoder_config = None
    return load_module(
        ctx,
        lambda: PocketTTSAudioTokenizerModel(codec),
        lambda name: (name,),
        checkpoint=None if ctx.load_format == "dummy" else Checkpoint(ctx.model_dir / CODEC),
        dtype=torch.float32,
        seed=zlib.crc32(b"vocoder"),
    )


def latent_statistics(ctx: LoadContext, config: PocketTTSConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean [D], standard deviation [D]) of the audio tokenizer's latents. Raises `ConfigError`."""
    if ctx.load_format == "dummy":
        return torch.zeros(config.latent_dim), torch.ones(config.latent_dim)
    checkpoint = Checkpoint(ctx.model_dir)
    return checkpoint.read("latent_mean").float(), checkpoint.read("latent_std").float()


def voice_names(model_dir: Path) -> tuple[str, ...]:
    """The checkpoint's voices, in alphabetical order."""
    return tuple(sorted(path.stem for path in (model_dir / VOICES).glob("*.safetensors")))


def load_voice(model_dir: Path, name: str, width: int) -> torch.Tensor:
    """[frames, D] float32. Raises `ConfigError` for a file of another form."""
    path = model_dir / VOICES / f"{name}.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            if LATENTS not in file.keys():  # noqa: SIM118 (not a dict)
                raise ConfigError(f"{path}: has no tensor {LATENTS!r}; voices as caches are not supported")
            latents: torch.Tensor = file.get_tensor(LATENTS).float()
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if latents.ndim == 3 and len(latents) == 1:
        latents = latents[0]
    if latents.ndim != 2 or latents.shape[1] != width or not len(latents):
        raise ConfigError(f"{path}: {LATENTS} is {list(latents.shape)}; it must be [frames, {width}]")
    return latents
