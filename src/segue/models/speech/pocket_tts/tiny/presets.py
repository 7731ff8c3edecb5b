"""`segue tiny pocket-tts`: write a small checkpoint in the library's layout, in seconds."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from segue.models.family import TinyPreset
from segue.models.shared.checkpoint.pretrained import without_bars
from segue.models.shared.library import GenerationConfig
from segue.models.shared.tiny.files import train_tokenizer, write_json, write_tokenizer
from segue.models.shared.tiny.sizes import check_size
from segue.models.speech.pocket_tts.loading import CODEC, LATENTS
from segue.models.speech.pocket_tts.loading import VOICES as FOLDER
from segue.models.speech.pocket_tts.tiny.config import (
    MARKS,
    PAD,
    SHAPES,
    SPECIAL_TOKENS,
    TEMPLATE,
    THRESHOLD,
    VOICES,
    codec_json,
    config_json,
)
from segue.models.speech.pocket_tts.tiny.weights import make_codec, make_model, make_voice

SIZES = tuple(SHAPES)


def make(directory: Path, size: str = "tiny", seed: int = 0) -> None:
    """Write a Pocket TTS checkpoint with random weights; equal size and seed give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    codec_dir = directory / CODEC
    codec_dir.mkdir(parents=True, exist_ok=True)
    (directory / FOLDER).mkdir(exist_ok=True)
    shape = SHAPES[size]
    with without_bars():
        model = make_model(config_json(shape), seed)
        model.generation_config = _generation()
        model.save_pretrained(directory)
        make_codec(codec_json(shape), seed).save_pretrained(codec_dir)
    write_json(directory, "config.json", config_json(shape))
    write_json(codec_dir, "config.json", codec_json(shape))
    for name, frames in VOICES.items():
        latents = make_voice(frames, shape.latent, seed + frames)
        save_file({LATENTS: latents}, directory / FOLDER / f"{name}.safetensors")
    write_tokenizer(
        directory,
        train_tokenizer(SPECIAL_TOKENS),
        SPECIAL_TOKENS,
        PAD,
        2048,
        extra_special_tokens=MARKS,
        processor_class="PocketTTSProcessor",
    )
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    write_json(
        directory,
        "processor_config.json",
        {
            "fade_in_duration": 0.005,
            "frames_after_eos": 2,
            "frames_after_eos_short_text": 4,
            "processor_class": "PocketTTSProcessor",
            "short_text_max_words": 4,
        },
    )


def _generation() -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=0.7,
        num_flow_steps=1,
        eos_threshold=THRESHOLD,
        min_frames_before_eos=6,
    )


PRESETS = {"pocket-tts": TinyPreset(SIZES, make)}
