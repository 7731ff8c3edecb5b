"""Configs of the tiny checkpoint, with the keys of the published ones of Higgs Audio v2 and its codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from segue.models.shared.tiny.files import BASE_VOCAB

SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|audio_out_bos|>",
    "<|reserved_special_token_6|>",
    "<|AUDIO|>",
    "<|AUDIO_OUT|>",
    "<|scene_desc_start|>",
    "<|scene_desc_end|>",
)
IDS = {token: BASE_VOCAB + index for index, token in enumerate(SPECIAL_TOKENS)}
_TEXT_VOCAB = 672
_UPSAMPLING = [8, 5, 4, 2, 3]
"""As published: 960 samples per frame."""
_FRAME_RATE = 25


@dataclass(frozen=True)
class Shape:
    """The numbers that differ between sizes; everything else is as published."""

    hidden: int
    layers: int
    heads: tuple[int, int]
    """Query heads and key/value heads."""
    codebooks: int
    code_bits: int
    """Of the codec's codes."""
    codec_hidden: int
    """Of its acoustic and of its semantic half each."""
    codec_channels: int


SHAPES = {
    "tiny": Shape(hidden=64, layers=3, heads=(4, 2), codebooks=8, code_bits=6, codec_hidden=16, codec_channels=64),
}


def config_json(shape: Shape) -> dict[str, Any]:
    """The `config.json` of the checkpoint."""
    codes = 2**shape.code_bits
    return {
        "architectures": ["HiggsAudioV2ForConditionalGeneration"],
        "model_type": "higgs_audio_v2",
        "dtype": "float32",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "audio_bos_token_id": IDS["<|audio_out_bos|>"],
        "audio_delay_token_id": IDS["<|reserved_special_token_6|>"],
        "audio_stream_bos_id": codes,
        "audio_stream_eos_id": codes + 1,
        "audio_token_id": IDS["<|AUDIO_OUT|>"],
        "bos_token_id": IDS["<|begin_of_text|>"],
        "codebook_size": codes + 2,
        "eos_token_id": IDS["<|eot_id|>"],
        "head_dim": shape.hidden // shape.heads[0],
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "num_attention_heads": shape.heads[0],
        "num_codebooks": shape.codebooks,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads[1],
        "pad_token_id": IDS["<|end_of_text|>"],
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "factor": 32.0,
            "high_freq_factor": 0.5,
            "low_freq_factor": 0.125,
            "original_max_position_embeddings": 1024,
            "rope_theta": 500000.0,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
        "vocab_size": _TEXT_VOCAB,
    }


def codec_json(shape: Shape) -> dict[str, Any]:
    """The `config.json` of the codec."""
    return {
        "architectures": ["HiggsAudioV2TokenizerModel"],
        "model_type": "higgs_audio_v2_tokenizer",
        "dtype": "float32",
        "acoustic_model_config": {
            "model_type": "dac",
            "codebook_dim": 8,
            "codebook_size": 2**shape.code_bits,
            "decoder_hidden_size": shape.codec_channels,
            "downsampling_ratios": _UPSAMPLING,
            "encoder_hidden_size": 4,
            "hidden_size": shape.codec_hidden,
            "sampling_rate": 24000,
            "upsampling_ratios": _UPSAMPLING,
        },
        "block_dilations": [1, 1],
        "channel_ratios": [1, 1],
        "codebook_dim": 8,
        "codebook_size": 2**shape.code_bits,
        "downsample_factor": 320,
        "kernel_size": 3,
        "sample_rate": 24000,
        "semantic_model_config": {
            "model_type": "hubert",
            "conv_dim": [8, 8, 8, 8, 8, 8, 8],
            "hidden_size": shape.codec_hidden,
            "intermediate_size": 2 * shape.codec_hidden,
            "mask_time_prob": 0.0,
            "num_attention_heads": 2,
            "num_conv_pos_embedding_groups": 2,
            "num_conv_pos_embeddings": 8,
            "num_hidden_layers": 1,
        },
        "semantic_sample_rate": 16000,
        "strides": [1, 1],
        "target_bandwidths": [shape.codebooks * shape.code_bits * _FRAME_RATE / 1000],
        "unit_kernel_size": 3,
    }
