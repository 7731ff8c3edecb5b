"""Configs of the tiny checkpoints, with the keys of the published files of Qwen3-TTS (12 Hz)."""

from __future__ import annotations

from typing import Any

from segue.models.shared.tiny.files import BASE_VOCAB

# in the published order, from 151643 on
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
)
ROLES = ("system", "user", "assistant")
"""One token each, as published: a prompt begins with three tokens."""
TEXT_VOCAB = 704
"""Rows of the text embedding: padded, like the published one."""
CODEBOOK = 64
RESERVED = 1024
"""The last ids of the talker's vocabulary, which are never drawn, except for the end token."""
GROUPS = 4
END = CODEBOOK + 102
PAD = CODEBOOK + 100
_IDS = {token: BASE_VOCAB + index for index, token in enumerate(SPECIAL_TOKENS)}
# ids minus the number of codes, as published
_LANGUAGES = {
    "english": 2,
    "german": 5,
    "spanish": 6,
    "chinese": 7,
    "japanese": 10,
    "french": 13,
    "sichuan_dialect": 14,
    "korean": 16,
    "russian": 21,
    "italian": 22,
    "portuguese": 23,
    "beijing_dialect": 26,
}
_VOICES = {"vivian": 1017, "ryan": 1013, "dylan": 830}
_ROPE = {"interleaved": True, "mrope_section": [8, 4, 4], "rope_type": "default", "type": "default"}
GENERATION = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_p": 1.0,
    "subtalker_top_k": 50,
    "max_new_tokens": 8192,
}


def config_json(kind: str) -> dict[str, Any]:
    """The `config.json` of a checkpoint. `kind`: its `tts_model_type`."""
    named = kind == "custom_voice"
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "dtype": "float32",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "1b7",
        "tts_model_type": kind,
        "assistant_token_id": BASE_VOCAB + len(SPECIAL_TOKENS) + ROLES.index("assistant"),
        "im_start_token_id": _IDS["<|im_start|>"],
        "im_end_token_id": _IDS["<|im_end|>"],
        "tts_pad_token_id": _IDS["<tts_pad>"],
        "tts_bos_token_id": _IDS["<tts_text_bos>"],
        "tts_eos_token_id": _IDS["<tts_text_eod>"],
        "talker_config": {
            "model_type": "qwen3_tts_talker",
            "vocab_size": CODEBOOK + RESERVED,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "rope_scaling": _ROPE,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "num_code_groups": GROUPS,
            "text_hidden_size": 96,
            "text_vocab_size": TEXT_VOCAB,
            "codec_pad_id": PAD,
            "codec_bos_id": CODEBOOK + 101,
            "codec_eos_token_id": END,
            "codec_think_id": CODEBOOK + 106,
            "codec_nothink_id": CODEBOOK + 107,
            "codec_think_bos_id": CODEBOOK + 108,
            "codec_think_eos_id": CODEBOOK + 109,
            "codec_language_id": {name: CODEBOOK + place for name, place in _LANGUAGES.items()},
            "spk_id": {name: CODEBOOK + place for name, place in _VOICES.items()} if named else {},
            "spk_is_dialect": {"vivian": False, "ryan": False, "dylan": "beijing_dialect"} if named else {},
            "code_predictor_config": {
                "model_type": "qwen3_tts_talker_code_predictor",
                "vocab_size": CODEBOOK,
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "hidden_act": "silu",
                "max_position_embeddings": 65536,
                "rms_norm_eps": 1e-06,
                "rope_theta": 1000000,
                "rope_scaling": None,
                "attention_bias": False,
                "use_sliding_window": False,
                "sliding_window": None,
                "max_window_layers": 28,
                "num_code_groups": GROUPS,
            },
        },
    }


def speech_tokenizer_json() -> dict[str, Any]:
    """The `config.json` of the speech tokenizer."""
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "dtype": "float32",
        "encoder_valid_num_quantizers": GROUPS,
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "decode_upsample_rate": 1920,
        "encode_downsample_rate": 1920,
        "encoder_config": {
            "model_type": "mimi",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_filters": 2,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "codebook_size": CODEBOOK,
            "codebook_dim": 16,
            "vector_quantization_hidden_dimension": 16,
            "num_quantizers": GROUPS,
            "upsample_groups": 16,
        },
        "decoder_config": {
            "codebook_size": CODEBOOK,
            "codebook_dim": 32,
            "num_quantizers": GROUPS,
            "latent_dim": 48,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "attention_bias": False,
            "sliding_window": 72,
            "max_position_embeddings": 8000,
            "rope_theta": 10000,
            "rms_norm_eps": 1e-05,
            "layer_scale_initial_scale": 0.01,
            "hidden_act": "silu",
            "decoder_dim": 64,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
        },
    }
