"""Configs of the tiny checkpoints, with the keys of the published `config.json` of CSM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from segue.models.shared.tiny.files import BASE_VOCAB

SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>")
"""In the published order, from 128000 on."""
IDS = {token: BASE_VOCAB + index for index, token in enumerate(SPECIAL_TOKENS)}
TEXT_VOCAB = 672
_BESIDE = 3
"""Ids of the language models' vocabulary that the codec does not have; the last one is the pad."""
END = 0
"""The code that ends an utterance in all codebooks."""


@dataclass(frozen=True)
class Shape:
    """The numbers that differ between sizes; everything else is as published."""

    hidden: int
    layers: int
    heads: tuple[int, int]
    """Query heads and key/value heads."""
    depth_hidden: int
    depth_layers: int
    depth_heads: tuple[int, int]
    codebooks: int
    codebook: int
    codec_hidden: int
    codec_layers: int
    codec_filters: int


SHAPES = {
    "tiny": Shape(
        hidden=64,
        layers=3,
        heads=(4, 2),
        depth_hidden=48,
        depth_layers=2,
        depth_heads=(4, 2),
        codebooks=8,
        codebook=64,
        codec_hidden=32,
        codec_layers=2,
        codec_filters=4,
    ),
}


def config_json(shape: Shape) -> dict[str, Any]:
    """The `config.json` of the checkpoint, in the published layout."""
    vocab = shape.codebook + _BESIDE
    return {
        "architectures": ["CsmForConditionalGeneration"],
        "model_type": "csm",
        "dtype": "float32",
        "attention_bias": False,
        "audio_eos_token_id": IDS["<|audio_eos|>"],
        "audio_token_id": IDS["<|AUDIO|>"],
        "bos_token_id": IDS["<|begin_of_text|>"],
        "codebook_eos_token_id": END,
        "codebook_pad_token_id": vocab - 1,
        "eos_token_id": None,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "num_attention_heads": shape.heads[0],
        "num_codebooks": shape.codebooks,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads[1],
        "head_dim": shape.hidden // shape.heads[0],
        "pad_token_id": IDS["<|AUDIO|>"],
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000,
        "rope_scaling": _rope(1024),
        "text_vocab_size": TEXT_VOCAB,
        "tie_codebooks_embeddings": True,
        "vocab_size": vocab,
        "depth_decoder_config": {
            "model_type": "csm_depth_decoder_model",
            "backbone_hidden_size": shape.hidden,
            "hidden_act": "silu",
            "hidden_size": shape.depth_hidden,
            "intermediate_size": 2 * shape.depth_hidden,
            "max_position_embeddings": 33,
            "num_attention_heads": shape.depth_heads[0],
            "num_codebooks": shape.codebooks,
            "num_hidden_layers": shape.depth_layers,
            "num_key_value_heads": shape.depth_heads[1],
            "head_dim": shape.depth_hidden // shape.depth_heads[0],
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000,
            "rope_scaling": _rope(16),
            "vocab_size": vocab,
        },
        "codec_config": {
            "model_type": "mimi",
            "audio_channels": 1,
            "codebook_dim": shape.codec_hidden // 2,
            "codebook_size": shape.codebook,
            "frame_rate": 12.5,
            "head_dim": shape.codec_hidden // 2,
            "hidden_act": "gelu",
            "hidden_size": shape.codec_hidden,
            "intermediate_size": 2 * shape.codec_hidden,
            "max_position_embeddings": 8000,
            "num_attention_heads": 2,
            "num_filters": shape.codec_filters,
            "num_hidden_layers": shape.codec_layers,
            "num_key_value_heads": 2,
            "num_quantizers": shape.codebooks,
            "num_semantic_quantizers": 1,
            "rope_theta": 10000.0,
            "sampling_rate": 24000,
            "sliding_window": 250,
            "upsample_groups": shape.codec_hidden,
            "upsampling_ratios": [8, 6, 5, 4],
            "vector_quantization_hidden_dimension": shape.codec_hidden // 2,
        },
    }


def _rope(original: int) -> dict[str, Any]:
    """The published factors, by the length for which the rotary frequencies were made."""
    return {
        "factor": 32.0,
        "high_freq_factor": original / 2048,
        "low_freq_factor": original / 8192,
        "original_max_position_embeddings": original,
        "rope_type": "llama3",
    }
