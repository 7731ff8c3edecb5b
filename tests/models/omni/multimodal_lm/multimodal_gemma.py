"""Tiny checkpoints of Gemma's families, in the form of `multimodal_others`."""

from __future__ import annotations

from typing import Any

from multimodal_others import HALF, TEXT_CONFIG

from segue.models.omni.multimodal_lm.tiny.config import SMALL
from segue.models.shared.tiny.files import BASE_VOCAB

_PLAIN = {key: value for key, value in TEXT_CONFIG.items() if key != "model_type"}
_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "<img_start>", "<img_end>", "<|video|>")
_TOKENS += ("<sound>", "<sound_start>", "<sound_end>")


def _id(token: str) -> int:
    return BASE_VOCAB + _TOKENS.index(token)


_TEXT_PART = "{%- for part in message.content | selectattr('type', 'equalto', 'text') %}"
_AUDIO_PART = _TEXT_PART.replace("'text'", "'audio'") + "{{- '<sound>' }}{%- endfor %}\n"
_TEMPLATE = (
    SMALL["llava-onevision"]
    .template.replace("<image>", "<img>")
    .replace("<video>", "<|video|>")
    .replace(_TEXT_PART, _AUDIO_PART + _TEXT_PART)
)
_SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 14,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}
_HEARING = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [128, 4],
    "output_proj_dims": 32,
    "use_clipped_linears": False,
}
_FOUR_TEXT = {
    **_PLAIN,
    "pad_token_id": BASE_VOCAB,
    "global_head_dim": 32,
    "sliding_window": 72,
    "layer_types": ["sliding_attention", "full_attention"],
}
_SMALLER_TEXT = {
    **_FOUR_TEXT,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 672,
    "hidden_size_per_layer_input": 8,
}
"""Layers take an embedding of the ids each."""
_LARGER_TEXT = {
    **_FOUR_TEXT,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
"""Tokens of an image see each other in layers with a window, and only there."""
_FOUR_IDS = {
    "image_token_id": _id("<img>"),
    "boi_token_id": _id("<img_start>"),
    "eoi_token_id": _id("<img_end>"),
    "video_token_id": _id("<|video|>"),
    "audio_token_id": _id("<sound>"),
    "boa_token_id": _id("<sound_start>"),
    "eoa_token_index": _id("<sound_end>"),
}
_FOUR_PARTS: dict[str, Any] = {
    "processor": {"processor_class": "Gemma4Processor"},
    "frames": {
        "video_processor_type": "Gemma4VideoProcessor",
        "num_frames": 4,
        "patch_size": 14,
        "pooling_kernel_size": 2,
        **HALF,
    },
    "special": _TOKENS,
    "template": _TEMPLATE,
    "tokens": {
        "image_token": "<img>",
        "boi_token": "<img_start>",
        "eoi_token": "<img_end>",
        "audio_token": "<sound>",
        "boa_token": "<sound_start>",
        "eoa_token": "<sound_end>",
    },
}
_FOUR_PIXELS = {
    "image_processor_type": "Gemma4ImageProcessor",
    "feature_extractor_type": "Gemma4AudioFeatureExtractor",
    "patch_size": 14,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
    "do_normalize": False,
}

_THREE_N = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img_start>", "<sound_start>")
_THREE_N += ("<img_end>", "<img>", "<img_7>", "<img_8>", "<sound_end>", "<sound>")
"""Those of images, then those of sound, are behind those of text: their encoders have rows for them."""
_FIRST_IMAGE, _FIRST_AUDIO = (BASE_VOCAB + _THREE_N.index(token) for token in ("<img_end>", "<sound_end>"))

GEMMA: dict[str, dict[str, Any]] = {
    "gemma4": {
        **_FOUR_PARTS,
        "config": {
            "vision_config": _SIGHT,
            "audio_config": _HEARING,
            "text_config": _SMALLER_TEXT,
            **_FOUR_IDS,
        },
        "pixels": _FOUR_PIXELS,
    },
    "gemma4_unified": {
        **_FOUR_PARTS,
        "config": {
            "vision_config": {
                "patch_size": 14,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 32,
                "mm_posemb_size": 64,
                "output_proj_dims": 32,
            },
            "audio_config": {},
            "text_config": _LARGER_TEXT,
            **_FOUR_IDS,
        },
        "processor": {"processor_class": "Gemma4UnifiedProcessor"},
        "pixels": {
            **_FOUR_PIXELS,
            "image_processor_type": "Gemma4UnifiedImageProcessor",
            "feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor",
        },
        "frames": {**_FOUR_PARTS["frames"], "video_processor_type": "Gemma4UnifiedVideoProcessor"},
    },
}
GEMMA_3N: dict[str, Any] = {
    "needs": "timm",
    "config": {
        "vision_config": {
            "architecture": "convnext_atto",
            "num_classes": 0,
            "model_args": {"depths": [1, 1, 1, 1], "dims": [8, 16, 32, 32], "ls_init_value": 1.0},
            "hidden_size": 32,
            "vocab_size": _FIRST_AUDIO - _FIRST_IMAGE,
            "vocab_offset": _FIRST_IMAGE,
        },
        "audio_config": {
            "vocab_size": _PLAIN["vocab_size"] - _FIRST_AUDIO,
            "vocab_offset": _FIRST_AUDIO,
            "hidden_size": 32,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": [8, 4],
        },
        "text_config": {
            **_PLAIN,
            "pad_token_id": BASE_VOCAB,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 24,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": _FIRST_IMAGE,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
        "audio_soft_tokens_per_image": 24,
        "vision_soft_tokens_per_image": 16,
        "image_token_id": BASE_VOCAB + _THREE_N.index("<img>"),
        "boi_token_id": BASE_VOCAB + _THREE_N.index("<img_start>"),
        "eoi_token_id": _FIRST_IMAGE,
        "audio_token_id": BASE_VOCAB + _THREE_N.index("<sound>"),
        "boa_token_id": BASE_VOCAB + _THREE_N.index("<sound_start>"),
        "eoa_token_id": _FIRST_AUDIO,
    },
    "processor": {"processor_class": "Gemma3nProcessor", "audio_seq_length": 24, "image_seq_length": 16},
    "pixels": {
        "image_processor_type": "SiglipImageProcessor",
        "feature_extractor_type": "Gemma3nAudioFeatureExtractor",
        "size": {"height": 128, "width": 128},
        **HALF,
    },
    "special": _THREE_N,
    "template": _TEMPLATE,
    "tokens": _FOUR_PARTS["tokens"],
}

GEMMA_4_LARGER: dict[str, Any] = {
    **_FOUR_PARTS,
    "config": {"vision_config": _SIGHT, "audio_config": None, "text_config": _LARGER_TEXT, **_FOUR_IDS},
    "pixels": _FOUR_PIXELS,
}
"""Of type `gemma4` as well."""
