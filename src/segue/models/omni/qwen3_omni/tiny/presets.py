"""`segue tiny qwen3-omni`: write a small checkpoint in the published layout, in seconds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from huggingface_hub import save_torch_state_dict

from segue.models.family import TinyPreset
from segue.models.omni.qwen3_omni.tiny.config import ROLES, SHAPES, SPECIAL_TOKENS, config_json
from segue.models.omni.qwen3_omni.tiny.weights import make_weights
from segue.models.shared.tiny.files import speakable, write_json
from segue.models.shared.tiny.qwen import write_qwen_tokenizer
from segue.models.shared.tiny.sizes import check_size

SIZES = tuple(SHAPES)
TEMPLATE = Path(__file__).parent / "data" / "chat_template.jinja"
_SHARD = {"tiny": "2MB", "small": "300MB", "medium": "300MB"}
MODEL_SPECIFIC = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
PREPROCESSOR = {
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
    tokenizer = write_qwen_tokenizer(
        directory,
        SPECIAL_TOKENS,
        ROLES,
        extra_special_tokens=MODEL_SPECIFIC,
        **MODEL_SPECIFIC,
        processor_class="Qwen3OmniMoeProcessor",
    )
    config = config_json(SHAPES[size], {role: tokenizer.get_vocab()[role] for role in ROLES})
    write("config.json", config)
    write("generation_config.json", {"_from_model_config": True, "transformers_version": "5.23.0"})
    write("preprocessor_config.json", PREPROCESSOR)
    write("chat_template.json", {"chat_template": TEMPLATE.read_text()})
    weights = make_weights(config, speakable(tokenizer), tokenizer.encode("\n").ids[0], seed)
    save_torch_state_dict(weights, directory, max_shard_size=_SHARD[size])


PRESETS = {"qwen3-omni": TinyPreset(SIZES, make)}
