"""`segue tiny qwen3-omni`: write a small checkpoint in the published layout, in seconds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from tokenizers import AddedToken, Tokenizer

from segue.models.family import TinyPreset
from segue.models.omni.qwen3_omni.tiny.config import ROLES, SHAPES, SPECIAL_TOKENS, config_json
from segue.models.omni.qwen3_omni.tiny.weights import make_weights
from segue.models.shared.tiny.files import added_tokens, speakable, train_tokenizer, write_json
from segue.models.shared.tiny.sizes import check_size

SIZES = tuple(SHAPES)
_DATA = Path(__file__).parent / "data"
_SHARD = "2MB"
_MODEL_SPECIFIC = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_PREPROCESSOR = {
    "processor_class": "Qwen3OmniMoeProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "video_processor_type": "Qwen2VLVideoProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 16,
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
    """Write a Qwen3-Omni checkpoint with random weights; equal size and seed give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    directory.mkdir(parents=True, exist_ok=True)
    write = partial(write_json, directory)
    tokenizer = _write_tokenizer(directory)
    config = config_json(SHAPES[size], {role: tokenizer.get_vocab()[role] for role in ROLES})
    write("config.json", config)
    write("generation_config.json", {"_from_model_config": True, "transformers_version": "5.23.0"})
    write("preprocessor_config.json", _PREPROCESSOR)
    write("chat_template.json", {"chat_template": (_DATA / "chat_template.jinja").read_text()})
    weights = make_weights(config, speakable(tokenizer), tokenizer.encode("\n").ids[0], seed)
    save_torch_state_dict(weights, directory, max_shard_size=_SHARD)


def _write_tokenizer(directory: Path) -> Tokenizer:
    tokenizer = train_tokenizer(SPECIAL_TOKENS)
    tokenizer.add_tokens([AddedToken(role, single_word=True, normalized=False) for role in ROLES])
    tokenizer.save(str(directory / "tokenizer.json"))
    base = json.loads(tokenizer.to_str())["model"]
    write_json(directory, "vocab.json", base["vocab"])
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in base["merges"]]
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    roles = added_tokens(tokenizer, ROLES)
    for flags in roles.values():
        flags |= {"single_word": True, "special": False}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {**added_tokens(tokenizer, SPECIAL_TOKENS), **roles},
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": _MODEL_SPECIFIC,
        **_MODEL_SPECIFIC,
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3OmniMoeProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    write_json(directory, "tokenizer_config.json", config)
    special = {"additional_special_tokens": list(SPECIAL_TOKENS[1:]), "eos_token": "<|im_end|>"}
    write_json(directory, "special_tokens_map.json", {**special, "pad_token": "<|endoftext|>"})
    return tokenizer


PRESETS = {"qwen3-omni": TinyPreset(SIZES, make)}
