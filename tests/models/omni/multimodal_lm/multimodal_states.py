"""Tiny checkpoints of families whose decoders keep a state, in the form of `multimodal_others`."""

from __future__ import annotations

from typing import Any

from causal_lm_family import STATES as OF_TEXT
from multimodal_more import MORE
from multimodal_others import HALF, SIGHT, TEXT_CONFIG

from segue.models.omni.multimodal_lm.tiny.config import SMALL
from segue.models.shared.tiny.files import BASE_VOCAB

_QWEN3 = MORE["qwen3_vl_moe"]
_PLAIN = {key: value for key, value in TEXT_CONFIG.items() if key != "model_type"}
_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    }
}
_TOWER = {key: value for key, value in _QWEN3["config"]["vision_config"].items() if key != "deepstack_visual_indexes"}
_IDS = {key: value for key, value in _QWEN3["config"].items() if key.endswith("_id")}
_LFM = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>", "<|image_end|>"),
    *("<|img_thumbnail|>", *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4))),
)

STATES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **_QWEN3,
        "config": {
            "vision_config": _TOWER,
            "text_config": {**_PLAIN, **OF_TEXT["qwen3_5_text"], **_ROPE, "tie_word_embeddings": False},
            **_IDS,
        },
    },
    "qwen3_5_moe": {
        **_QWEN3,
        "config": {
            "vision_config": _TOWER,
            "text_config": {**_PLAIN, **OF_TEXT["qwen3_5_moe_text"], **_ROPE, "tie_word_embeddings": False},
            **_IDS,
        },
    },
    "lfm3_vl": {
        **_QWEN3,
        "config": {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "layer_types": ["conv", "conv", "full_attention"],
            },
            "text_config": {
                **TEXT_CONFIG,
                **OF_TEXT["lfm3"],
                "model_type": "lfm3",
                "pad_token_id": BASE_VOCAB,
            },
            "projector_hidden_size": 32,
            **_IDS,
        },
        "processor": {"processor_class": "Lfm3VlProcessor"},
    },
    "lfm2_vl": {
        "config": {
            "vision_config": {**SIGHT, "model_type": "siglip2_vision_model", "num_patches": 16},
            "text_config": {**TEXT_CONFIG, **OF_TEXT["lfm2"], "model_type": "lfm2"},
            "image_token_id": BASE_VOCAB + _LFM.index("<image>"),
            "projector_hidden_size": 32,
        },
        "processor": {"processor_class": "Lfm2VlProcessor"},
        "pixels": {
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": 14,
            "tile_size": 56,
            "min_image_tokens": 1,
            "max_image_tokens": 8,
            "max_tiles": 4,
            **HALF,
        },
        "tokens": {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        "special": _LFM,
        "template": SMALL["llava-onevision"].template,
    },
}
