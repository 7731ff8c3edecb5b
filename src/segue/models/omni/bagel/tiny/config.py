"""Configs of the tiny checkpoint, with the keys of the published files of BAGEL-7B-MoT."""

from __future__ import annotations

from typing import Any

from segue.models.shared.tiny.files import BASE_VOCAB

# in the published order, from 151643 on
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
VOCAB = 704
"""Rows of the embedding: padded, like the published one."""
END = BASE_VOCAB + SPECIAL_TOKENS.index("<|im_end|>")
LATENT_SIDE = 8
"""Tokens of latents per side of the largest image: 128 pixels."""

ROOT: dict[str, Any] = {
    "architectures": ["BagelForConditionalGeneration"],
    "name": ["BAGEL-tiny"],
    "vae_config": {"ch": 32, "ch_mult": [1, 1, 1, 2], "num_res_blocks": 1, "z_channels": 4},
}
LLM: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": BASE_VOCAB,
    "eos_token_id": END,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
VIT: dict[str, Any] = {
    "hidden_size": 32,
    "image_size": 84,
    "intermediate_size": 64,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "patch_size": 14,
}
_SMALL_LLM = {
    "hidden_size": 448,
    "intermediate_size": 2368,
    "num_attention_heads": 7,
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
}
_SMALL_VIT = {
    "hidden_size": 144,
    "image_size": 980,
    "intermediate_size": 538,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
}
_SMALL_ROOT = {"vae_config": {"ch": 32, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 1, "z_channels": 16}}
SIZES: dict[str, tuple[dict[str, dict[str, Any]], int]] = {
    "tiny": ({"config.json": ROOT, "llm_config.json": LLM, "vit_config.json": VIT}, LATENT_SIDE),
    # of the published model: widths by 8, layers by 4; images of the published size
    "small": (
        {"config.json": ROOT | _SMALL_ROOT, "llm_config.json": LLM | _SMALL_LLM, "vit_config.json": VIT | _SMALL_VIT},
        64,
    ),
}
"""Size → its files, and the tokens of latents per side of the largest image."""
