"""Configs of the small checkpoints, with the keys of the published files of MiMo-Audio and its tokenizer."""

from __future__ import annotations

from typing import Any

from segue.models.shared.tiny.files import BASE_VOCAB

# in the published order, from 151643 on
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|sosp|>", "<|eosp|>", "<|empty|>"),
    *("<|Human|>", "<|SpeechLM|>", "<|sostm|>", "<|eostm|>", "<|eot|>"),
)
ROLES = ("system", "user", "assistant")
"""One token each, as published."""
IDS = {token: BASE_VOCAB + index for index, token in enumerate(SPECIAL_TOKENS)}
TEXT_VOCAB = 680
"""Rows of the text embedding: padded, like the published one."""
CODES = (32, 32, 16, 16, 16, 16, 16, 16)
"""Of each channel, without the empty one."""


def config_json(size: str = "tiny") -> dict[str, Any]:
    """The `config.json` of the language model."""
    return _CONFIG | _SIZES[size][0]


def codec_json(size: str = "tiny") -> dict[str, Any]:
    """The `config.json` of the audio tokenizer."""
    return _CODEC | _SIZES[size][1]


_CONFIG: dict[str, Any] = {
    "architectures": ["MiMoAudioModel"],
    "model_type": "qwen2",
    "dtype": "float32",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "audio_channels": len(CODES),
    "delay_pattern": "-".join(str(channel) for channel in range(len(CODES))),
    "group_size": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "input_full_attention": True,
    "input_local_dim": 32,
    "input_local_layers": 2,
    "intermediate_size": 128,
    "local_attn_dropout": 0.1,
    "local_attn_heads": 4,
    "local_dim": 32,
    "local_ffn_dim": 64,
    "local_layers": 2,
    "max_position_embeddings": 8192,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 640000,
    "sliding_window": None,
    "speech_vocab_size": "-".join(str(count + 1) for count in CODES),
    "speech_zeroemb_idx": "-".join(str(count) for count in CODES),
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": TEXT_VOCAB,
}
_CODEC: dict[str, Any] = {
    "model_type": "mimo_audio_tokenizer",
    "max_audio_seconds": 1800,
    "stride_size": 2,
    "avg_pooler": 2,
    "d_model": 32,
    "scale_embedding": False,
    "kernel_size": 3,
    "activation_function": "gelu",
    "encoder_layers": 3,
    "encoder_skip_layer_id": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "encoder_causal": False,
    "encoder_attn_window_size": [-1, -1],
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "decoder_kernel_size": 3,
    "decoder_stride_size": 2,
    "decoder_causal": True,
    "decoder_attn_window_size": [-1, -1],
    "nfft": 960,
    "vocoder_dim": 32,
    "vocoder_intermediate_dim": 64,
    "vocoder_num_layers": 3,
    "n_mels": 32,
    "sampling_rate": 24000,
    "hop_length": 240,
    "window_size": 960,
    "vocoder_padding": "same",
    "fmin": 0,
    "fmax": None,
    "num_quantizers": 10,
    "codebook_size": [*CODES, 16, 16],
    "threshold_ema_dead_code": 2,
    "position_embedding_type": "rope",
    "rope_theta": 10000,
    "rope_type": "default",
    "ln_type": "LayerNorm",
    "vocoder_attention_heads": 4,
    "vocoder_attn_window_size": [40, 10],
}
_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": ({}, {}),
    # of the published model: widths by 8, layers by 4
    "small": (
        {
            "head_dim": 128,
            "hidden_size": 512,
            "input_local_dim": 128,
            "intermediate_size": 1376,
            "local_attn_heads": 8,
            "local_dim": 128,
            "local_ffn_dim": 512,
            "local_layers": 4,
            "num_hidden_layers": 9,
            "num_key_value_heads": 1,
        },
        {
            "d_model": 160,
            "encoder_layers": 8,
            "encoder_ffn_dim": 640,
            "decoder_layers": 8,
            "decoder_ffn_dim": 640,
        },
    ),
}
"""What a size has otherwise than the tiny one: of the language model, and of the audio tokenizer."""
SIZES = tuple(_SIZES)
