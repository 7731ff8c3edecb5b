"""`segue tiny qwen2.5-omni`: write a small checkpoint in the published layout, in seconds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import Tokenizer

from segue.models.family import TinyPreset
from segue.models.omni.qwen2_5_omni.tiny.config import (
    SHAPES,
    SPECIAL_TOKENS,
    VOICES,
    Shape,
    config_json,
)
from segue.models.omni.qwen2_5_omni.tiny.weights import EndGains, make_weights
from segue.models.shared.tiny.files import added_tokens, speakable, train_tokenizer, write_json
from segue.models.shared.tiny.sizes import check_size

SIZES = tuple(SHAPES)
_DATA = Path(__file__).parent / "data"
_END_GAINS = {"tiny": EndGains(1.8, 1.5, 1.4), "small": EndGains(1.8, 2.1, 3.0)}
_SHARD = {"tiny": "3MB", "small": "300MB"}
_MODEL_SPECIFIC = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_PREPROCESSOR = {
    "processor_class": "Qwen2_5OmniProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "chunk_length": 300,
    "dither": 0.0,
    "feature_size": 128,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 16000,
}


def make(directory: Path, size: str = "tiny", seed: int = 0) -> None:
    """Write a Qwen2.5-Omni checkpoint with random weights; equal size and seed give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    shape = SHAPES[size]
    directory.mkdir(parents=True, exist_ok=True)
    config = config_json(shape)
    write = partial(write_json, directory)
    tokenizer = _write_tokenizer(directory)
    write("config.json", config)
    write("generation_config.json", {"_from_model_config": True, "transformers_version": "5.23.0"})
    write("preprocessor_config.json", _PREPROCESSOR)
    write("chat_template.json", {"chat_template": (_DATA / "chat_template.jinja").read_text()})
    weights = make_weights(config, speakable(tokenizer), tokenizer.encode("\n").ids[0], _END_GAINS[size], seed)
    save_torch_state_dict(weights, directory, max_shard_size=_SHARD[size])
    torch.save(_speakers(shape, seed), directory / "spk_dict.pt")


def _write_tokenizer(directory: Path) -> Tokenizer:
    tokenizer = train_tokenizer(SPECIAL_TOKENS)
    tokenizer.save(str(directory / "tokenizer.json"))
    base = json.loads(tokenizer.to_str())["model"]
    write_json(directory, "vocab.json", base["vocab"])
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in base["merges"]]
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    _write_tokenizer_config(directory, tokenizer)
    return tokenizer


def _write_tokenizer_config(directory: Path, tokenizer: Tokenizer) -> None:
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added_tokens(tokenizer, SPECIAL_TOKENS),
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": _MODEL_SPECIFIC,
        **_MODEL_SPECIFIC,
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen2_5OmniProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    write_json(directory, "tokenizer_config.json", config)
    special = {"additional_special_tokens": list(SPECIAL_TOKENS[1:]), "eos_token": "<|im_end|>"}
    write_json(directory, "special_tokens_map.json", {**special, "pad_token": "<|endoftext|>"})


def _speakers(shape: Shape, seed: int) -> dict[str, dict[str, Any]]:
    """The speaker file: per voice a speaker vector, a reference log-mel and the voice's text id."""
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        voice: {
            "cond": torch.randn(1, 192, generator=generator),
            "ref_mel": 2.0 * torch.randn(1, shape.reference_frames, 80, generator=generator) - 4.0,
            "bos_token": text_id,
        }
        for voice, text_id in VOICES.items()
    }


PRESETS = {"qwen2.5-omni": TinyPreset(SIZES, make)}
