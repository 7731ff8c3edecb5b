"""The config files of a checkpoint as values, and what they say that cannot be served. No torch here.

Keys and defaults are those of the public package `qwen-tts`; others are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.files import read_object

SPEECH_TOKENIZER = "speech_tokenizer"
"""The folder of the vocoder."""
GENERATION = "generation_config.json"
KINDS = ("custom_voice", "voice_design")
"""The served kinds (`tts_model_type`)."""
AUTO = "auto"
"""The language that the model finds out itself."""
_CODEC = "qwen3_tts_tokenizer_12hz"


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of Qwen3's layers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    use_sliding_window: bool = False


class Talker(Decoder, frozen=True, kw_only=True):
    """The decoder that draws code 0 of each row."""

    code_predictor_config: Decoder
    num_code_groups: int
    text_hidden_size: int
    text_vocab_size: int
    codec_eos_token_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    codec_pad_id: int
    codec_bos_id: int
    spk_id: dict[str, int] = {}
    """Voice → its codec id."""
    spk_is_dialect: dict[str, str | bool] = {}
    """Voice → the dialect that it speaks, or false."""
    codec_language_id: dict[str, int] = {}
    """Language or dialect → its codec id."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """`config.json`."""

    talker_config: Talker
    tts_model_type: str
    tts_model_size: str = ""
    tokenizer_type: str = _CODEC
    tts_pad_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int

    @property
    def takes_instructions(self) -> bool:
        """The package ignores the instructions of a small custom-voice model."""
        return self.tts_model_type == "voice_design" or self.tts_model_size != "0b6"

    @property
    def languages(self) -> list[str]:
        """What a request can name: `auto`, and the languages that are not dialects."""
        return [AUTO, *(name for name in self.talker_config.codec_language_id if "dialect" not in name)]

    @property
    def voices(self) -> list[str]:
        """The names of the voices for clients, the config's first one being the default; none for voice design."""
        return [name.title() for name in self.talker_config.spk_id] if self.tts_model_type == "custom_voice" else []


class VocoderDecoder(msgspec.Struct, frozen=True, kw_only=True):
    """`decoder_config` of the speech tokenizer."""

    codebook_size: int = 2048
    codebook_dim: int = 512
    hidden_size: int = 1024
    latent_dim: int = 1024
    head_dim: int | None = None
    max_position_embeddings: int = 8000
    rope_theta: float = 10000.0
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    attention_bias: bool = False
    sliding_window: int = 72
    intermediate_size: int = 3072
    hidden_act: str = "silu"
    layer_scale_initial_scale: float = 0.01
    rms_norm_eps: float = 1e-5
    num_hidden_layers: int = 8
    num_quantizers: int = 16
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)
    upsampling_ratios: tuple[int, ...] = (2, 2)
    decoder_dim: int = 1536


class Vocoder(msgspec.Struct, frozen=True, kw_only=True):
    """`speech_tokenizer/config.json`."""

    decoder_config: VocoderDecoder
    model_type: str = _CODEC
    output_sample_rate: int = 24000


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """`generation_config.json`, with the package's defaults; `subtalker`: of the codes after the first."""

    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    max_new_tokens: int = 4096
    subtalker_dosample: bool = True
    subtalker_temperature: float = 0.9
    subtalker_top_k: int = 50
    subtalker_top_p: float = 1.0


T = TypeVar("T")


def config_of(values: dict[str, Any], path: Path | str) -> Config:
    """`config.json` of `path`. Raises `ConfigError` with the key, or the reason why the model cannot be served."""
    config = _convert(values, Config, path)
    if config.tts_model_type not in KINDS:
        clones = ": it speaks with the voice of a recording, which is not supported" * (config.tts_model_type == "base")
        raise ConfigError(
            f"{path}: tts_model_type is {config.tts_model_type!r}{clones}; served are {' and '.join(KINDS)}",
            field="tts_model_type",
        )
    if config.tokenizer_type != _CODEC:
        raise ConfigError(
            f"{path}: tokenizer_type is {config.tokenizer_type!r}; served is {_CODEC!r}", field="tokenizer_type"
        )
    talker = config.talker_config
    if config.tts_model_type == "custom_voice" and not talker.spk_id:
        raise ConfigError(f"{path}: talker_config has no spk_id, so no voice", field="spk_id")
    for part in (talker, talker.code_predictor_config):
        kind = (part.rope_scaling or {}).get("rope_type", (part.rope_scaling or {}).get("type", "default"))
        if kind != "default":
            raise ConfigError(f"{path}: rope_type is {kind!r}; served is 'default'", field="rope_scaling")
        if part.use_sliding_window:
            raise ConfigError(
                f"{path}: use_sliding_window is true; served is a talker that sees all before", field="talker_config"
            )
    _check_ids(config, path)
    return config


def _check_ids(config: Config, path: Path | str) -> None:
    """Raise `ConfigError` for an id outside its vocabulary, or a dialect without one."""
    talker = config.talker_config
    own = {name: getattr(talker, f"codec_{name}_id") for name in ("think", "nothink", "think_bos", "think_eos")}
    own |= {"pad": talker.codec_pad_id, "bos": talker.codec_bos_id, "eos_token": talker.codec_eos_token_id}
    codec = {f"codec_{name}_id": value for name, value in own.items()} | talker.spk_id | talker.codec_language_id
    text = {f"tts_{name}_token_id": getattr(config, f"tts_{name}_token_id") for name in ("pad", "bos", "eos")}
    for ids, size in ((codec, talker.vocab_size), (text, talker.text_vocab_size)):
        for name, value in ids.items():
            if not 0 <= value < size:
                raise ConfigError(f"{path}: the id of {name} is {value}; ids are 0 to {size - 1}", field=name)
    for voice, dialect in talker.spk_is_dialect.items():
        if dialect and dialect not in talker.codec_language_id:
            raise ConfigError(
                f"{path}: spk_is_dialect of {voice} is {dialect!r}, which is not in codec_language_id",
                field="spk_is_dialect",
            )


def read_config(model_dir: Path) -> Config:
    """Raises `ConfigError`, as `config_of`."""
    path = model_dir / "config.json"
    return config_of(read_object(path), path)


def read_vocoder(model_dir: Path) -> Vocoder:
    """Raises `ConfigError` with the file and the key."""
    path = model_dir / SPEECH_TOKENIZER / "config.json"
    vocoder = _convert(read_object(path), Vocoder, path)
    if vocoder.model_type != _CODEC:
        raise ConfigError(f"{path}: model_type is {vocoder.model_type!r}; served is {_CODEC!r}", field="model_type")
    return vocoder


def read_sampling(model_dir: Path) -> Sampling:
    """The defaults if the checkpoint has no such file. Raises `ConfigError` with the file and the key."""
    path = model_dir / GENERATION
    return _convert(read_object(path), Sampling, path) if path.is_file() else Sampling()


def _convert(values: dict[str, Any], kind: type[T], path: Path | str) -> T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", field="model") from error
