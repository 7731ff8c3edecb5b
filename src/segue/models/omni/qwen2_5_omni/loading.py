"""Load each stage's part of a Qwen2.5-Omni checkpoint: built from its own config, with its own weights only.

Names in published checkpoints (Qwen/Qwen2.5-Omni-7B, -3B): `thinker.model.*` (decoder), `thinker.lm_head`,
`thinker.visual.*`, `thinker.audio_tower.*`, `talker.*`, `token2wav.*`. Newer transformers nests the first, third and
fourth (`thinker.model.language_model.*`, …) but saves and loads the published names; this module reads both.
"""

from __future__ import annotations

import logging
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from segue.engines.autoregressive.contract import KVSpec
from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError, nearest
from segue.models.omni.qwen2_5_omni.family import DEFAULT_VOICE, SPEAKERS
from segue.models.omni.qwen2_5_omni.library import (
    PreTrainedModel,
    Qwen2_5OmniAudioEncoder,
    Qwen2_5OmniConfig,
    Qwen2_5OmniTalkerForConditionalGeneration,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerTextModel,
    Qwen2_5OmniToken2WavModel,
    Qwen2_5OmniVisionEncoder,
)
from segue.models.shared.checkpoint.checkpoint import Checkpoint, Located, M, load_module

EMBEDDING = ("thinker.model.embed_tokens.weight", "thinker.model.language_model.embed_tokens.weight")
LM_HEAD = ("thinker.lm_head.weight",)

LOAD_FORMATS = ("auto", "dummy")


class ThinkerDecoder(nn.Module):
    """The language half of `Qwen2_5OmniThinkerForConditionalGeneration`: decoder and head, without encoders."""

    def __init__(self, config: Qwen2_5OmniThinkerConfig) -> None:
        super().__init__()
        text = config.text_config
        self.model = Qwen2_5OmniThinkerTextModel(text)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)


class Encoders(nn.Module):
    """The thinker's vision and audio encoders."""

    def __init__(self, config: Qwen2_5OmniThinkerConfig) -> None:
        super().__init__()
        self.visual = Qwen2_5OmniVisionEncoder(config.vision_config)
        self.audio_tower = Qwen2_5OmniAudioEncoder(config.audio_config)


@dataclass(frozen=True)
class Part:
    """One stage's part of the model: its constructor, and the names of its tensors in the checkpoint."""

    build: Callable[[Qwen2_5OmniConfig], nn.Module]
    located: Located


def _decoder_names(name: str) -> Sequence[str]:
    if name == "lm_head.weight":
        return LM_HEAD
    rest = name.removeprefix("model.")
    return (f"thinker.model.{rest}", f"thinker.model.language_model.{rest}")


PARTS: dict[str, Part] = {
    "encoder": Part(lambda c: Encoders(c.thinker_config), lambda name: (f"thinker.{name}", f"thinker.model.{name}")),
    "thinker": Part(lambda c: ThinkerDecoder(c.thinker_config), _decoder_names),
    "talker": Part(
        lambda c: Qwen2_5OmniTalkerForConditionalGeneration(c.talker_config), lambda name: (f"talker.{name}",)
    ),
    "vocoder": Part(lambda c: Qwen2_5OmniToken2WavModel(c.token2wav_config), lambda name: (f"token2wav.{name}",)),
}
"""By stage. Together the parts cover the whole model; no tensor belongs to two."""


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
    if ctx.load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format is {ctx.load_format!r}{nearest(ctx.load_format, LOAD_FORMATS)}", field="load_format"
        )
    path = ctx.model_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: not there, so {str(ctx.model_dir)!r} is no checkpoint", field="model")
    # the talker's config names ids of the thinker's vocabulary; the library warns that they exceed the talker's own
    with _errors_only("transformers.configuration_utils"):
        try:
            return Qwen2_5OmniConfig.from_pretrained(ctx.model_dir)
        except (OSError, ValueError, TypeError, StrictDataclassError) as error:
            raise ConfigError(f"{path}: {error}", field="model") from error


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    """Suppress one logger's warnings."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def open_checkpoint(ctx: LoadContext) -> Checkpoint | None:
    """The checkpoint's tensors, or None for random weights."""
    return None if ctx.load_format == "dummy" else Checkpoint(ctx.model_dir)


def load_part(ctx: LoadContext, config: Qwen2_5OmniConfig, stage: str, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a stage's part of the model on `ctx.device`, in `ctx.dtype` unless `dtype` is passed."""
    part = PARTS[stage]
    return _load(ctx, lambda: part.build(config), part.located, stage, dtype)


def load_encoders(ctx: LoadContext, config: Qwen2_5OmniConfig) -> Encoders:
    return _load(ctx, lambda: Encoders(config.thinker_config), PARTS["encoder"].located, "encoder")


def load_decoder(ctx: LoadContext, config: Qwen2_5OmniConfig) -> ThinkerDecoder:
    """Decoder and head; if the config ties them and the checkpoint has no head, the head is the embedding."""
    checkpoint = open_checkpoint(ctx)
    tied = config.thinker_config.tie_word_embeddings
    without_head = checkpoint is not None and tied and LM_HEAD[0] not in checkpoint

    def located(name: str) -> Sequence[str]:
        return EMBEDDING if without_head and name == "lm_head.weight" else _decoder_names(name)

    decoder = _load(ctx, lambda: ThinkerDecoder(config.thinker_config), located, "thinker")
    if tied:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    return decoder


def load_talker(ctx: LoadContext, config: Qwen2_5OmniConfig) -> Qwen2_5OmniTalkerForConditionalGeneration:
    return load_part(ctx, config, "talker")


def load_token2wav(ctx: LoadContext, config: Qwen2_5OmniConfig | None = None) -> Qwen2_5OmniToken2WavModel:
    """The vocoder, always in float32, as in the reference."""
    return load_part(ctx, config or load_config(ctx), "vocoder", torch.float32)


def kv_spec(model: PreTrainedModel, dtype: torch.dtype, capture_width: int = 0) -> KVSpec:
    """The KV cache spec of a decoder, from the shapes of its first attention layer."""
    attention = model.layers[0].self_attn
    return KVSpec(
        layers=len(model.layers),
        kv_heads=attention.num_key_value_heads,
        head_dim=attention.head_dim,
        dtype=dtype,
        capture_width=capture_width,
        capture_dtype=dtype,
    )


def load_text_rows(ctx: LoadContext, config: Qwen2_5OmniConfig, ids: Sequence[int]) -> torch.Tensor:
    """Rows of the thinker's embedding, [len(ids), hidden] of `ctx.dtype` on `ctx.device`; reads only these rows."""
    text = config.thinker_config.text_config
    for token_id in ids:
        if not 0 <= token_id < text.vocab_size:
            raise ConfigError(
                f"{ctx.model_dir}: text token {token_id} is named by the talker's config or {SPEAKERS}, "
                f"but the thinker has {text.vocab_size} tokens"
            )
    checkpoint = open_checkpoint(ctx)
    if checkpoint is None:
        generator = torch.Generator().manual_seed(_seed("rows"))
        rows = torch.randn(len(ids), text.hidden_size, generator=generator) * text.hidden_size**-0.5
    else:
        rows = checkpoint.read(checkpoint.find(EMBEDDING), rows=ids)
        if rows.shape[1] != text.hidden_size:
            raise ConfigError(
                f"{ctx.model_dir}: tensor {EMBEDDING[0]!r} has rows of {rows.shape[1]}; "
                f"the config asks for {text.hidden_size}"
            )
    return rows.to(device=ctx.device, dtype=ctx.dtype)


def load_speakers(ctx: LoadContext, config: Qwen2_5OmniConfig) -> dict[str, Speaker]:
    """The voices of the checkpoint's `spk_dict.pt` (on the CPU), the default first; only tensors are unpickled.

    With random weights and no such file, returns one random voice of the right shape.
    """
    path = ctx.model_dir / SPEAKERS
    if ctx.load_format == "dummy" and not path.is_file():
        return {DEFAULT_VOICE: _random_speaker(config)}
    if not path.is_file():
        raise ConfigError(f"{path}: not there; a checkpoint that speaks has its voices in it")
    try:
        entries = torch.load(path, weights_only=True, map_location="cpu")
        speakers = {
            str(name): Speaker(int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float())
            for name, entry in entries.items()
        }
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, pickle.UnpicklingError) as error:
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
