"""Tiny checkpoints of families with decoders or processors of their own, in the form of `multimodal_others`."""

from __future__ import annotations

from typing import Any

from multimodal_more import MORE
from multimodal_parts import (
    AREA,
    HALF,
    KIMI_TOWER,
    LLAVA_TEMPLATE,
    MERGED,
    PLAIN,
    QWEN,
    QWEN3,
    QWEN3_TOWER,
    QWEN_IDS,
    QWEN_TOWER,
    SAM,
    SIGHT,
    SIGLIP,
    SQUARE,
    TEXT_CONFIG,
    THREE_AXES,
    TURNS,
    WINDOWED,
    token_id,
)
from multimodal_sounds import AUDIO

from segue.models.shared.tiny.files import BASE_VOCAB

_STEP = (*TURNS, "<im_patch>", "<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
_PASS = (*TURNS, "<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>")
_MINI = (*TURNS, "]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")
_MINI += ("]<]start of video[>[", "]<]end of video[>[")
_MUSE = (*TURNS, "<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>", "<|vid_frame_separator|>")
_MUSE += ("<|vid_start|>", "<|vid_end|>", "<|audio|>", "<|soft_audio_start|>", "<|soft_audio_end|>")
_ERNIE = (*TURNS, "<img>", "<img_start>", "<img_end>", "<clip>", "<clip_start>", "<clip_end>")
_TEXT_PART = "{%- for part in message.content | selectattr('type', 'equalto', 'text') %}"


def _placing(image: str, video: str = "", audio: str = "") -> str:
    """The template with other placeholders."""
    audio_part = _TEXT_PART.replace("'text'", "'audio'") + f"{{{{- '{audio}' }}}}{{%- endfor %}}\n"
    template = LLAVA_TEMPLATE.replace("<image>", image).replace("<video>", video)
    return template.replace(_TEXT_PART, audio_part + _TEXT_PART) if audio else template


_BARE = """\
{%- for message in messages %}
{%- for part in message.content | selectattr('type', 'equalto', 'image') %}{{- '<image>' }}{%- endfor %}
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{- part.text }}{%- endfor %}
{%- endfor %}
"""
"""No turns: PaliGemma's checkpoints have no template."""

_MUSE_FRAMES = {
    "video_processor_type": "MuseGlimmerVideoProcessor",
    "return_metadata": True,
    "size": AREA,
    **MERGED,
}
_MUSE_SIGHT = {**KIMI_TOWER, "max_position_embeddings": 64}
_MUSE_TEXT = {**PLAIN, **WINDOWED}
_MUSE_IDS = {"image_token_id": token_id(_MUSE, "<|patch|>"), "video_token_id": token_id(_MUSE, "<|video|>")}
_MUSE_SIZES = {"out_hidden_size": 128, "projector_hidden_size": 32}

NEWEST: dict[str, dict[str, Any]] = {
    "glmga": {
        **MORE["glm46v"],
        "config": {
            **MORE["glm46v"]["config"],
            "vision_config": {**MORE["glm46v"]["config"]["vision_config"], "model_type": "glm4v_vision"},
        },
        "processor": {"processor_class": "Glm46VProcessor"},
        "pixels": {**MORE["glm46v"]["pixels"], "image_processor_type": "GlmgaImageProcessor"},
        "frames": {**MORE["glm46v"]["frames"], "video_processor_type": "GlmgaVideoProcessor"},
    },
    "cosmos3_omni": {
        **MORE["qwen3_vl_moe"],
        "config": {
            "vision_config": QWEN3_TOWER,
            "text_config": {**PLAIN, **QWEN3.text, "tie_word_embeddings": False},
            **QWEN_IDS,
        },
    },
    "cosmos3_edge": {
        "config": {
            "vision_config": {**SIGHT, "num_patches": 16},
            "text_config": {
                **PLAIN,
                "rope_parameters": THREE_AXES,
            },
            "projector_hidden_size": 32,
            **QWEN_IDS,
        },
        "asks": {"return_mm_token_type_ids": True},
        "processor": {"processor_class": "Cosmos3EdgeProcessor"},
        "pixels": {
            "image_processor_type": "Cosmos3EdgeImageProcessor",
            "size": AREA,
            **MERGED,
        },
        "frames": {
            "video_processor_type": "Cosmos3EdgeVideoProcessor",
            "return_metadata": True,
            "size": AREA,
            **MERGED,
        },
        "special": QWEN.special,
        "template": QWEN.template,
    },
    "cohere_compass": {
        "config": {
            "vision_config": QWEN3_TOWER,
            "text_config": {
                **PLAIN,
                **WINDOWED,
                "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), THREE_AXES),
                "logit_scale": 0.25,
                "pad_token_id": BASE_VOCAB,
            },
            "image_token_id": token_id(_PASS, "<|IMAGE_PAD|>"),
            "video_token_id": token_id(_PASS, "<|VIDEO_PAD|>"),
            "vision_start_token_id": token_id(_PASS, "<|VISION_START|>"),
            "vision_end_token_id": token_id(_PASS, "<|VISION_END|>"),
        },
        "processor": {"processor_class": "CohereCompassProcessor"},
        "pixels": {**QWEN3.files["preprocessor_config.json"], "image_processor_type": "CohereCompassImageProcessor"},
        "frames": {
            **QWEN3.files["video_preprocessor_config.json"],
            "video_processor_type": "CohereCompassVideoProcessor",
        },
        "special": _PASS,
        "template": _placing("<|VISION_START|><|IMAGE_PAD|><|VISION_END|>", "<|VIDEO_PAD|>"),
    },
    "ernie4_5_vl_moe": {
        "config": {
            "vision_config": {**{key: value for key, value in QWEN_TOWER.items() if key != "out_hidden_size"}},
            "text_config": {
                **PLAIN,
                "moe_intermediate_size": [48, 32],
                "moe_k": 2,
                "moe_num_experts": 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
                "mlp_layer_types": ["dense", "sparse"],
            },
            "image_start_token_id": token_id(_ERNIE, "<img_start>"),
            "image_end_token_id": token_id(_ERNIE, "<img_end>"),
            "image_token_id": token_id(_ERNIE, "<img>"),
            "video_start_token_id": token_id(_ERNIE, "<clip_start>"),
            "video_end_token_id": token_id(_ERNIE, "<clip_end>"),
            "video_token_id": token_id(_ERNIE, "<clip>"),
        },
        "processor": {"processor_class": "Ernie4_5_VLMoeProcessor"},
        "pixels": {
            "image_processor_type": "Ernie4_5_VLMoeImageProcessor",
            "size": AREA,
            **MERGED,
        },
        "frames": {
            "video_processor_type": "Ernie4_5_VLMoeVideoProcessor",
            "size": AREA,
            "draw_on_frames": False,
            **MERGED,
        },
        "special": _ERNIE,
        "template": _placing("<img_start><img><img_end>", "<clip_start><clip><clip_end>"),
        "tokens": {
            "image_token": "<img>",
            "image_start_token": "<img_start>",
            "image_end_token": "<img_end>",
            "video_token": "<clip>",
            "video_start_token": "<clip_start>",
            "video_end_token": "<clip_end>",
        },
    },
    "step3p7": {
        "config": {
            "vision_config": {**SIGHT, "image_size": 112, "max_position_embeddings": 64},
            "text_config": {
                **PLAIN,
                "pad_token_id": BASE_VOCAB,
                "num_experts_per_tok": 2,
                "num_local_experts": 4,
                "n_routed_experts": 4,
                "moe_intermediate_size": 48,
                "share_expert_dim": 48,
                "sliding_window": 24,
                "layer_types": ["full_attention", "sliding_attention"],
                "mlp_layer_types": ["dense", "sparse"],
            },
            "image_token_id": token_id(_STEP, "<im_patch>"),
        },
        "processor": {"processor_class": "Step3p7Processor"},
        "pixels": {
            "image_processor_type": "Step3p7ImageProcessor",
            "size": {"height": 112, "width": 112},
            "patch_size": 56,
            **HALF,
        },
        "special": _STEP,
        "template": _placing("<im_patch>"),
    },
    "deepseek_ocr2": {
        "config": {
            "vision_config": {
                "sam_config": {**SAM, "image_size": 1024, "downsample_channels": [16, 32]},
                "encoder_config": {
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                },
            },
            "text_config": {
                **{key: value for key, value in PLAIN.items() if key != "head_dim"},
                "n_group": 1,
                "topk_group": 1,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
                "mlp_layer_types": ["dense", "sparse"],
            },
            "image_token_id": 643,
        },
        "processor": {"processor_class": "DeepseekOcr2Processor"},
        "pixels": {
            "image_processor_type": "DeepseekOcr2ImageProcessor",
            "size": {"height": 1024, "width": 1024},
            "tile_size": 768,
            **HALF,
        },
        "tokens": {"image_token": "<image>"},
    },
    "pp_chart2table": {
        **MORE["got_ocr2"],
        "config": {
            **MORE["got_ocr2"]["config"],
            "vision_config": {**MORE["got_ocr2"]["config"]["vision_config"], "model_type": "pp_chart2table_vision"},
        },
        "processor": {"processor_class": "PPChart2TableProcessor"},
        "pixels": {
            "image_processor_type": "PPChart2TableImageProcessor",
            "size": {"height": 256, "width": 256},
            **HALF,
        },
    },
    "fun_asr_nano": {
        "one": True,  # recording in a prompt, its processor takes no more
        "needs": "torchaudio",
        "config": {
            "audio_config": {
                "num_mel_bins": 80,
                "hidden_size": 32,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_timestamp_prediction_layers": 1,
            },
            "adaptor_config": {
                "hidden_size": 64,
                "num_attention_heads": 2,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "projector_hidden_size": 64,
            },
            "text_config": {**TEXT_CONFIG, "model_type": "qwen3"},
            "audio_token_id": 643,
        },
        "processor": {"processor_class": "FunAsrNanoProcessor", "audio_token": "<sound>"},
        "pixels": {"feature_extractor_type": "FunAsrNanoFeatureExtractor"},
        "special": AUDIO["glmasr"]["special"],
        "template": AUDIO["glmasr"]["template"],
    },
    "minimax_m3_vl": {
        "config": {
            "vision_config": {**SIGHT, "image_size": 112},
            "text_config": {
                **PLAIN,
                "num_experts_per_tok": 2,
                "num_local_experts": 4,
                "dense_intermediate_size": 96,
                "shared_intermediate_size": 48,
                "rotary_dim": 8,
                "index_n_heads": 2,
                "index_head_dim": 16,
            },
            "projector_hidden_size": 32,
            "image_token_index": token_id(_MINI, "]<]image[>["),
            "video_token_index": token_id(_MINI, "]<]video[>["),
        },
        "processor": {"processor_class": "MiniMaxM3VLProcessor"},
        "pixels": {
            "image_processor_type": "MiniMaxM3VLImageProcessor",
            **MERGED,
        },
        "frames": {
            "video_processor_type": "MiniMaxM3VLVideoProcessor",
            "fps": 2.0,
            **MERGED,
        },
        "special": _MINI,
        "template": _placing("]<]image[>[", "]<]video[>["),
    },
    "muse_glimmer": {
        "config": {"vision_config": _MUSE_SIGHT, "text_config": _MUSE_TEXT, **_MUSE_IDS, **_MUSE_SIZES},
        "processor": {"processor_class": "MuseGlimmerProcessor"},
        "pixels": {
            "image_processor_type": "MuseGlimmerImageProcessor",
            "size": AREA,
            **MERGED,
        },
        "frames": _MUSE_FRAMES,
        "special": _MUSE,
        "template": _placing("<|patch|>", "<|video|>"),
    },
    "muse_spark": {
        "config": {
            "vision_config": _MUSE_SIGHT,
            "text_config": {
                **_MUSE_TEXT,
                "moe_intermediate_size": 48,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "moe_hidden_size": 32,
            },
            "audio_config": {
                "hidden_sizes": [16, 16, 32, 32],
                "depths": [1, 1, 1, 1],
                "out_hidden_size": 64,
            },
            **_MUSE_IDS,
            "audio_token_id": token_id(_MUSE, "<|audio|>"),
            **_MUSE_SIZES,
        },
        "processor": {"processor_class": "MuseSparkProcessor"},
        "pixels": {
            "image_processor_type": "MuseGlimmerImageProcessor",
            "sampling_rate": 16_000,
            "size": AREA,
            **MERGED,
        },
        "frames": _MUSE_FRAMES,
        "special": _MUSE,
        "template": _placing("<|patch|>", "<|video|>", "<|audio|>"),
    },
}

PALIGEMMA: dict[str, Any] = {
    "config": {
        "vision_config": {**SIGLIP, "projection_dim": 64},
        "text_config": {**PLAIN, "model_type": "gemma", "pad_token_id": BASE_VOCAB},
        "image_token_index": 643,
        "projection_dim": 64,
    },
    "processor": {"processor_class": "PaliGemmaProcessor"},
    "pixels": {
        "image_processor_type": "SiglipImageProcessor",
        "image_seq_length": 16,
        **SQUARE,
    },
    "tokens": {"image_token": "<image>", "bos_token": "<|im_start|>"},
    "template": _BARE,
}

PALIGEMMA_2: dict[str, Any] = {
    **PALIGEMMA,
    "config": {
        **PALIGEMMA["config"],
        "text_config": {
            **PALIGEMMA["config"]["text_config"],
            "model_type": "gemma2",
            "sliding_window": 120,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
}
