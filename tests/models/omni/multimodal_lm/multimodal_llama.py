"""Tiny checkpoints of Llama's families, in the form of `multimodal_others`."""

from __future__ import annotations

from typing import Any

from multimodal_others import HALF, SIGHT, TEXT_CONFIG

from segue.models.omni.multimodal_lm.tiny.config import SMALL
from segue.models.shared.tiny.files import BASE_VOCAB

_PLAIN = {key: value for key, value in TEXT_CONFIG.items() if key != "model_type"}
_LLAMA_4 = (*("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image|>", "<|patch|>", "<|image_start|>"),)
_LLAMA_4 += ("<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>")

LLAMA: dict[str, dict[str, Any]] = {
    "llama4": {
        "config": {
            "vision_config": {
                **SIGHT,
                "intermediate_size": 128,  # of the adapter's input: hidden size / pixel_shuffle_ratio squared
                "projector_input_dim": 64,
                "projector_output_dim": 64,
                "vision_output_dim": 64,
                "pixel_shuffle_ratio": 0.5,
            },
            "text_config": {
                **_PLAIN,
                "intermediate_size_mlp": 96,
                "num_local_experts": 4,
                "no_rope_layer_interval": 2,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 32,
            },
            "image_token_index": BASE_VOCAB + _LLAMA_4.index("<|patch|>"),
        },
        "processor": {"processor_class": "Llama4Processor", "patch_size": 14, "pixel_shuffle_ratio": 0.5},
        "pixels": {
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": 56, "width": 56},
            "max_patches": 4,
            **HALF,
        },
        "special": _LLAMA_4,
        "template": SMALL["llava-onevision"].template.replace("<image>", "<|image|>"),
    },
}
