"""Configs of the tiny checkpoints, with the keys of the published `config.json` of Qwen3-Omni."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
"""One token each, as published: the talker tells turns apart by it."""
IDS = {token: BASE_VOCAB + index for index, token in enumerate(SPECIAL_TOKENS)}
VOCAB = 704
"""Rows of the thinker's embedding: padded, like the published one."""
RESERVED = 1024
"""The last ids of the talker's vocabulary, which the library never draws, except for the end token."""


@dataclass(frozen=True)
class Encoder:
    """The shape of one media encoder."""

    layers: int
    hidden: int
    heads: int
    intermediate: int


@dataclass(frozen=True)
class Shape:
    """The numbers that differ between sizes; everything else is as published."""

    thinker_hidden: int
    thinker_layers: int
    thinker_heads: tuple[int, int]
    """Query heads and key/value heads."""
    thinker_experts: tuple[int, int, int]
    """Experts, experts per token, width of an expert."""
    talker_hidden: int
    talker_layers: int
    talker_heads: tuple[int, int]
    talker_experts: tuple[int, int, int]
    head_dim: int
    accepted_layer: int
    """The thinker's layer whose hidden states the talker takes."""
    audio: Encoder
    downsample: int
    """Channels of the convolutions before the audio encoder."""
    vision: Encoder
    deep_layers: tuple[int, ...]
    """Layers of the vision encoder whose features enter the thinker's first layers."""
    position_rows: int
    """The vision encoder's learned positions, a square number."""
    codebook: int
    code_groups: int
    predictor_layers: int
    predictor_heads: tuple[int, int]
    predictor_intermediate: int
    vocoder_hidden: int
    vocoder_layers: int
    vocoder_heads: int
    vocoder_intermediate: int
    vocoder_channels: int


def narrowed(by: int) -> Shape:
    """Qwen3-Omni-30B-A3B with all widths divided by `by`, 4 or 8, and all numbers of layers by 4, rounded.

    As published: numbers of experts, code groups and codes, rates and upsampling. Heads are a quarter as wide, so that
    their number need not be a fraction; the text vocabulary is that of the tiny checkpoints.
    """
    heads = by // 4
    return Shape(
        thinker_hidden=2048 // by,
        thinker_layers=12,
        thinker_heads=(32 // heads, 4 // heads),
        thinker_experts=(128, 8, 768 // by),
        talker_hidden=1024 // by,
        talker_layers=5,
        talker_heads=(16 // heads, 2 // heads),
        talker_experts=(128, 6, 384 // by),
        head_dim=32,
        accepted_layer=6,
        audio=Encoder(8, 1280 // by, 20 // heads, 5120 // by),
        downsample=480 // by,
        vision=Encoder(7, 1152 // by, 16 // by, 4304 // by),
        deep_layers=(2, 4, 6),
        position_rows=2304,
        codebook=2048,
        code_groups=16,
        predictor_layers=1,
        predictor_heads=(16 // heads, 8 // heads),
        predictor_intermediate=3072 // by,
        vocoder_hidden=1024 // by,
        vocoder_layers=2,
        vocoder_heads=16 // by,
        vocoder_intermediate=3072 // by,
        vocoder_channels=1536 // by,
    )


SHAPES = {
    "tiny": Shape(
        thinker_hidden=64,
        thinker_layers=4,
        thinker_heads=(4, 2),
        thinker_experts=(4, 2, 48),
        talker_hidden=64,
        talker_layers=3,
        talker_heads=(4, 2),
        talker_experts=(4, 2, 32),
        head_dim=32,
        accepted_layer=2,
        audio=Encoder(3, 64, 2, 128),
        downsample=16,
        vision=Encoder(3, 64, 2, 128),
        deep_layers=(0, 1),
        position_rows=64,
        codebook=64,
        code_groups=4,
        predictor_layers=2,
        predictor_heads=(4, 2),
        predictor_intermediate=128,
        vocoder_hidden=32,
        vocoder_layers=2,
        vocoder_heads=2,
        vocoder_intermediate=64,
        vocoder_channels=64,
    ),
    "small": narrowed(8),
    "medium": narrowed(4),
}
"""`small` and `medium` are for benchmarks."""


def config_json(shape: Shape, roles: Mapping[str, int]) -> dict[str, Any]:
    """The `config.json` of the checkpoint, in the published layout. `roles`: their ids."""
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "enable_audio_output": True,
        "dtype": "float32",
        "im_start_token_id": IDS["<|im_start|>"],
        "im_end_token_id": IDS["<|im_end|>"],
        "system_token_id": roles["system"],
        "user_token_id": roles["user"],
        "assistant_token_id": roles["assistant"],
        "tts_pad_token_id": IDS["<tts_pad>"],
        "tts_bos_token_id": IDS["<tts_text_bos>"],
        "tts_eos_token_id": IDS["<tts_text_eod>"],
        "thinker_config": _thinker(shape, roles["user"]),
        "talker_config": _talker(shape),
        "code2wav_config": _code2wav(shape),
    }


def _rope(head_dim: int) -> dict[str, Any]:
    half = head_dim // 2
    space = half * 5 // 16  # 24, 20, 20 of 64 as published
    sections = [half - 2 * space, space, space]
    return {
        "rope_theta": 1000000,
        "rope_scaling": {"interleaved": True, "mrope_section": sections, "rope_type": "default", "type": "default"},
    }


def _media_ids() -> dict[str, Any]:
    return {
        "audio_token_id": IDS["<|audio_pad|>"],
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "audio_start_token_id": IDS["<|audio_start|>"],
        "audio_end_token_id": IDS["<|audio_end|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }


def _experts(experts: tuple[int, int, int]) -> dict[str, Any]:
    return {
        "num_experts": experts[0],
        "num_experts_per_tok": experts[1],
        "moe_intermediate_size": experts[2],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    }


def _thinker(shape: Shape, user: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_thinker",
        **_media_ids(),
        "user_token_id": user,
        "text_config": {
            "model_type": "qwen3_omni_moe_text",
            "vocab_size": VOCAB,
            "hidden_size": shape.thinker_hidden,
            "intermediate_size": shape.thinker_experts[2],
            "num_hidden_layers": shape.thinker_layers,
            "num_attention_heads": shape.thinker_heads[0],
            "num_key_value_heads": shape.thinker_heads[1],
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-06,
            "sliding_window": None,
            "tie_word_embeddings": False,
            **_experts(shape.thinker_experts),
            **_rope(shape.head_dim),
        },
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            "num_mel_bins": 128,
            "encoder_layers": shape.audio.layers,
            "encoder_attention_heads": shape.audio.heads,
            "encoder_ffn_dim": shape.audio.intermediate,
            "d_model": shape.audio.hidden,
            "max_source_positions": 1500,
            "n_window": 50,
            "n_window_infer": 800,
            "conv_chunksize": 500,
            "downsample_hidden_size": shape.downsample,
            "output_dim": shape.thinker_hidden,
        },
        "vision_config": {
            "model_type": "qwen3_omni_moe_vision_encoder",
            "depth": shape.vision.layers,
            "hidden_size": shape.vision.hidden,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": shape.vision.intermediate,
            "num_heads": shape.vision.heads,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": shape.thinker_hidden,
            "num_position_embeddings": shape.position_rows,
            "deepstack_visual_indexes": list(shape.deep_layers),
        },
    }


def _talker(shape: Shape) -> dict[str, Any]:
    codec = shape.codebook + 100
    hidden, heads = shape.talker_hidden, shape.talker_heads
    return {
        "model_type": "qwen3_omni_moe_talker",
        **_media_ids(),
        "accept_hidden_layer": shape.accepted_layer,
        "thinker_hidden_size": shape.thinker_hidden,
        "num_code_groups": shape.code_groups,
        "output_router_logits": False,
        "spatial_merge_size": 2,
        "codec_pad_id": codec,
        "codec_bos_id": codec + 1,
        "codec_eos_token_id": codec + 2,
        "codec_nothink_id": codec + 7,
        "codec_think_bos_id": codec + 8,
        "codec_think_eos_id": codec + 9,
        "speaker_id": {"chelsie": codec + 153, "ethan": codec + 154, "aiden": codec + 155},
        "text_config": {
            "model_type": "qwen3_omni_moe_talker_text",
            "vocab_size": shape.codebook + RESERVED,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": shape.talker_layers,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-06,
            "sliding_window": None,
            "shared_expert_intermediate_size": 2 * shape.talker_experts[2],
            **_experts(shape.talker_experts),
            **_rope(shape.head_dim),
        },
        "code_predictor_config": {
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            "vocab_size": shape.codebook,
            "hidden_size": hidden,
            "intermediate_size": shape.predictor_intermediate,
            "num_hidden_layers": shape.predictor_layers,
            "num_attention_heads": shape.predictor_heads[0],
            "num_key_value_heads": shape.predictor_heads[1],
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "num_code_groups": shape.code_groups,
        },
    }


def _code2wav(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_code2wav",
        "codebook_size": shape.codebook,
        "num_quantizers": shape.code_groups,
        "hidden_size": shape.vocoder_hidden,
        "intermediate_size": shape.vocoder_intermediate,
        "num_hidden_layers": shape.vocoder_layers,
        "num_attention_heads": shape.vocoder_heads,
        "num_key_value_heads": shape.vocoder_heads,
        "sliding_window": 72,
        "max_position_embeddings": 8000,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-05,
        "layer_scale_initial_scale": 0.01,
        "hidden_act": "silu",
        "decoder_dim": shape.vocoder_channels,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }
