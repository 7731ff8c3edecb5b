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
FILES = {"config.json": ROOT, "llm_config.json": LLM, "vit_config.json": VIT}
