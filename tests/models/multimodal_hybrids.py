"""Tiny checkpoints whose decoder keeps a state per sequence, in the form of `multimodal_others`."""

from __future__ import annotations

from typing import Any

from causal_lm_family import STATES
from multimodal_more import MORE
from multimodal_others import HALF, SIGHT, TEXT_CONFIG

from segue.models.tiny.files import BASE_VOCAB

_QWEN = MORE["qwen3_vl_moe"]
_TOWER = {key: value for key, value in _QWEN["config"]["vision_config"].items() if key != "deepstack_visual_indexes"}
_PLAIN = {key: value for key, value in TEXT_CONFIG.items() if key != "model_type"}
_ROPE = {**_QWEN["config"]["text_config"]["rope_parameters"], "partial_rotary_factor": 1.0}
_LFM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>", "<|image_end|>")
_LFM += ("<|img_thumbnail|>",)


def _qwen(kind: str) -> dict[str, Any]:
    text = {**_PLAIN, **STATES[f"{kind}_text"], "rope_parameters": _ROPE, "tie_word_embeddings": False}
    return {**_QWEN, "config": {**_QWEN["config"], "vision_config": _TOWER, "text_config": text}}


HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": _qwen("qwen3_5"),
    "qwen3_5_moe": _qwen("qwen3_5_moe"),
    "lfm2_vl": {
        "config": {
            "vision_config": {**SIGHT, "model_type": "siglip2_vision_model", "num_patches": 16},
            "text_config": {**_PLAIN, **STATES["lfm2"], "model_type": "lfm2"},
            "image_token_id": BASE_VOCAB + _LFM.index("<image>"),
            "projector_hidden_size": 32,
        },
        "processor": {"processor_class": "Lfm2VlProcessor"},
        "pixels": {
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": 14,
            "tile_size": 56,
            "min_image_tokens": 2,
            "max_image_tokens": 8,
            "max_tiles": 4,
            **HALF,
        },
        "special": _LFM,
        "tokens": {"image_token": "<image>"},
    },
}
