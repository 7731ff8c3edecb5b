"""What the tiny checkpoints of `multimodal_others` and its like have in common: towers, decoders, images, tokens."""

from __future__ import annotations

from segue.models.omni.multimodal_lm.tiny.config import SMALL
from segue.models.shared.tiny.files import BASE_VOCAB

QWEN = SMALL["qwen2.5-vl"]
QWEN3 = SMALL["qwen3-vl"]
QWEN_IDS = {key: QWEN.id_of(token) for key, token in QWEN.ids.items()}
LLAVA_TEMPLATE = SMALL["llava-onevision"].template

# --- decoders --------------------------------------------------------------------------------------------------------

PLAIN = {
    "vocab_size": 672,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
TEXT_CONFIG = {"model_type": "llama", **PLAIN}
WINDOWED = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
"""Rotary positions of time, height and width."""

# --- towers ----------------------------------------------------------------------------------------------------------

SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
CLIP_TOWER = {**SIGHT, "model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP = {**SIGHT, "model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL = {**SIGHT, "model_type": "pixtral", "image_size": 112, "head_dim": 16}
QWEN_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "depth": 2}
QWEN3_TOWER = {**QWEN_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
SAM = {
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "window_size": 4,
    "global_attn_indexes": [1],
    "mlp_dim": 64,
}
KIMI_TOWER = {
    "patch_size": 14,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
}

# --- processors ------------------------------------------------------------------------------------------------------

HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
CROP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, **HALF}
SQUARE = {"size": {"height": 56, "width": 56}, **HALF}
AREA = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
"""Fewest and most pixels."""
MERGED = {"patch_size": 14, "merge_size": 2, **HALF}
TILES = [[56, 112], [112, 56], [112, 112]]
GOT_PIXELS = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "crop_to_patches": True,
    "min_patches": 1,
    "max_patches": 4,
    **SQUARE,
}
PIXTRAL_PIXELS = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 112},
    "patch_size": 28,
    **HALF,
}
LLAVA_PROCESSOR = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
}

# --- tokens ----------------------------------------------------------------------------------------------------------

TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def token_id(tokens: tuple[str, ...], token: str) -> int:
    """Of one of a tokenizer's special tokens."""
    return BASE_VOCAB + tokens.index(token)
