"""The config files of a checkpoint as values, and what they say that cannot be served. No torch here.

The audio tokenizer is a checkpoint of its own (XiaomiMiMo/MiMo-Audio-Tokenizer): Segue reads it from the folder
`audio_tokenizer` within the language model's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.files import read_object

CODEC = "audio_tokenizer"
"""The folder of the audio tokenizer."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """`config.json` of the language model: a Qwen2 decoder, and two small ones over the frames of a patch."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    use_sliding_window: bool = False
    speech_vocab_size: str | int = "1025-1025-129-129-129-129-129-129"
    speech_zeroemb_idx: str | int = "1024-1024-128-128-128-128-128-128"
    delay_pattern: str | int = "0-1-2-3-4-5-6-7"
    group_size: int = 4
    """Frames of a patch."""
    audio_channels: int = 8
    """Codes of a frame."""
    local_dim: int = 1024
    local_layers: int = 16
    local_attn_heads: int = 64
    local_ffn_dim: int = 4096
    input_local_layers: int = 6
    input_local_dim: int | None = None
    input_full_attention: bool | None = None

    @property
    def code_counts(self) -> list[int]:
        """Of each channel: the size of its vocabulary, the empty code included."""
        return _per_channel(self.speech_vocab_size, self.audio_channels)

    @property
    def empty_codes(self) -> list[int]:
        """Of each channel: the code of a frame without audio."""
        return _per_channel(self.speech_zeroemb_idx, self.audio_channels)

    @property
    def delays(self) -> list[int]:
        """Of each channel: the steps of the local decoder by which it lags behind."""
        return _per_channel(self.delay_pattern, self.audio_channels)

    @property
    def encoder_dim(self) -> int:
        """Width of the patch encoder."""
        return self.input_local_dim or self.local_dim

    @property
    def codes_per_patch(self) -> int:
        return self.group_size * self.audio_channels


class Codec(msgspec.Struct, frozen=True, kw_only=True):
    """`config.json` of the audio tokenizer."""

    stride_size: int = 2
    avg_pooler: int = 1
    d_model: int = 768
    kernel_size: int = 3
    activation_function: str = "gelu"
    encoder_layers: int = 8
    encoder_skip_layer_id: int | None = None
    encoder_attention_heads: int = 12
    encoder_ffn_dim: int = 3072
    encoder_causal: bool = False
    encoder_attn_window_size: tuple[int, int] = (-1, -1)
    decoder_layers: int = 8
    decoder_attention_heads: int = 12
    decoder_ffn_dim: int = 3072
    decoder_kernel_size: int = 3
    decoder_stride_size: int = 2
    decoder_causal: bool = True
    decoder_attn_window_size: tuple[int, int] = (-1, -1)
    nfft: int = 1024
    vocoder_dim: int = 512
    vocoder_intermediate_dim: int = 4096
    vocoder_num_layers: int = 30
    vocoder_attention_heads: int = 4
    vocoder_attn_window_size: tuple[int, int] = (40, 10)
    vocoder_padding: str = "same"
    n_mels: int = 80
    sampling_rate: int = 24000
    hop_length: int = 240
    window_size: int = 1024
    fmin: float = 0.0
    fmax: float | None = None
    num_quantizers: int = 12
    codebook_size: tuple[int, ...] = (1024,)
    position_embedding_type: str = "rope"
    rope_theta: float = 10000.0
    rope_type: str = "default"
    ln_type: str = "LayerNorm"

    @property
    def hop(self) -> int:
        """Samples per frame of codes."""
        return self.hop_length * self.stride_size * self.avg_pooler

    @property
    def shortest(self) -> int:
        """Samples of the shortest recording: the spectrogram mirrors half a window at both ends."""
        return self.nfft // 2 + 1

    def codes_of(self, channel: int) -> int:
        """Size of a codebook."""
        return self.codebook_size[min(channel, len(self.codebook_size) - 1)]


_SERVED = {
    "activation_function": "gelu",
    "kernel_size": 3,
    "ln_type": "LayerNorm",
    "position_embedding_type": "rope",
    "rope_type": "default",
    "vocoder_padding": "same",
}
"""Keys of the audio tokenizer whose published value is the only one that is served."""
_SEGMENT = 6000
"""Spectrogram frames of a recording that are encoded at once (a minute)."""

T = TypeVar("T")


def config_of(values: dict[str, Any], path: Path | str) -> Config:
    """`config.json` of `path`. Raises `ConfigError` with the key, or the reason why the model cannot be served."""
    config = _convert(values, Config, path)
    kind = (config.rope_scaling or {}).get("rope_type", (config.rope_scaling or {}).get("type", "default"))
    if kind != "default":
        raise ConfigError(f"{path}: rope_type is {kind!r}; served is 'default'", field="rope_scaling")
    if config.use_sliding_window:
        raise ConfigError(f"{path}: use_sliding_window is true; served is full attention", field="use_sliding_window")
    for name in ("group_size", "audio_channels", "local_layers", "local_attn_heads"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{path}: {name} is {getattr(config, name)}; it must be at least 1", field=name)
    for name, numbers in (
        ("speech_vocab_size", _numbers(config, "speech_vocab_size", path)),
        ("speech_zeroemb_idx", _numbers(config, "speech_zeroemb_idx", path)),
        ("delay_pattern", _numbers(config, "delay_pattern", path)),
    ):
        if len(numbers) != config.audio_channels:
            raise ConfigError(
                f"{path}: {name} has {len(numbers)} numbers; audio_channels is {config.audio_channels}", field=name
            )
    for channel, (empty, count) in enumerate(zip(config.empty_codes, config.code_counts, strict=True)):
        if empty != count - 1:
            raise ConfigError(
                f"{path}: the empty code of channel {channel} is {empty}; it must be the last of its {count} codes",
                field="speech_zeroemb_idx",
            )
    return config


def read_config(model_dir: Path) -> Config:
    """Raises `ConfigError`, as `config_of`."""
    path = model_dir / "config.json"
    return config_of(read_object(path), path)


def read_codec(model_dir: Path, config: Config) -> Codec:
    """Raises `ConfigError` with the file and the key, or what does not fit the language model."""
    path = model_dir / CODEC / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{path}: not there; put the checkpoint MiMo-Audio-Tokenizer into the folder {CODEC!r} of this one",
            field="model",
        )
    codec = _convert(read_object(path), Codec, path)
    for name, wanted in _SERVED.items():
        if getattr(codec, name) != wanted:
            raise ConfigError(f"{path}: {name} is {getattr(codec, name)!r}; served is {wanted!r}", field=name)
    if codec.avg_pooler < 2:
        raise ConfigError(f"{path}: avg_pooler is {codec.avg_pooler}; it must be at least 2", field="avg_pooler")
    if codec.window_size != codec.nfft:
        raise ConfigError(
            f"{path}: window_size is {codec.window_size}; served is that of nfft, {codec.nfft}", field="window_size"
        )
    if codec.num_quantizers < config.audio_channels:
        raise ConfigError(
            f"{path}: num_quantizers is {codec.num_quantizers}, but the language model has {config.audio_channels} "
            "channels",
            field="num_quantizers",
        )
    for channel, count in enumerate(config.code_counts):
        if codec.codes_of(channel) != count - 1:
            raise ConfigError(
                f"{path}: codebook {channel} has {codec.codes_of(channel)} codes, the language model's has {count - 1}",
                field="codebook_size",
            )
    return codec


def frames_of(samples: int, codec: Codec) -> int:
    """Frames of codes that a recording of so many samples becomes."""
    segments = segments_of(1 + samples // codec.hop_length)
    return sum(math.ceil(math.ceil(mel / codec.stride_size) / codec.avg_pooler) for mel in segments)


def segments_of(mel: int) -> list[int]:
    """Lengths of the segments in which a spectrogram of so many frames is encoded."""
    whole, rest = divmod(mel, _SEGMENT)
    return [_SEGMENT] * whole + [rest] * bool(rest)


def _per_channel(value: str | int, channels: int) -> list[int]:
    if isinstance(value, str) and "-" in value:
        return [int(number) for number in value.split("-")]
    return [int(value)] * channels


def _numbers(config: Config, name: str, path: Path | str) -> list[int]:
    value = getattr(config, name)
    try:
        return _per_channel(value, config.audio_channels)
    except ValueError:
        raise ConfigError(f"{path}: {name} is {value!r}; it must be numbers joined by -", field=name) from None


def _convert(values: dict[str, Any], kind: type[T], path: Path | str) -> T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", field="model") from error
