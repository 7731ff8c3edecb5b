"""`segue tiny mimo-audio`: write a small checkpoint in the published layout, in seconds."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import save_torch_state_dict

from segue.models.family import TinyPreset
from segue.models.shared.tiny.files import speakable, write_json
from segue.models.shared.tiny.qwen import write_qwen_tokenizer
from segue.models.shared.tiny.sizes import check_size
from segue.models.speech.mimo_audio.config import CODEC
from segue.models.speech.mimo_audio.tiny import config
from segue.models.speech.mimo_audio.tiny.weights import make_codec, make_language_model

SIZES = config.SIZES


def make(directory: Path, size: str = "tiny", seed: int = 0) -> None:
    """Write a MiMo-Audio checkpoint with random weights, and its tokenizer of audio; equal arguments give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    codec = directory / CODEC
    codec.mkdir(parents=True, exist_ok=True)
    tokenizer = write_qwen_tokenizer(directory, config.SPECIAL_TOKENS, config.ROLES)
    write_json(directory, "config.json", config.config_json(size))
    write_json(codec, "config.json", config.codec_json(size))
    save_torch_state_dict(make_language_model(config.config_json(size), speakable(tokenizer), seed), directory)
    save_torch_state_dict(make_codec(config.codec_json(size), config.config_json(size), seed + 1), codec)


PRESETS = {"mimo-audio": TinyPreset(SIZES, make)}
