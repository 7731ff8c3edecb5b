"""Tiny checkpoints of still further families, in the form of `multimodal_others`."""

from __future__ import annotations

from typing import Any

from multimodal_parts import (
    AREA,
    CLIP_TOWER,
    CROP,
    GOT_PIXELS,
    HALF,
    KIMI_TOWER,
    LLAVA_PROCESSOR,
    LLAVA_TEMPLATE,
    MERGED,
    PIXTRAL,
    PIXTRAL_PIXELS,
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
    TILES,
    TURNS,
    WINDOWED,
    token_id,
)

_IMAGE_AND_VIDEO = {key: QWEN_IDS[key] for key in ("image_token_id", "video_token_id")}
_QWEN_PIXELS = {**QWEN.files["preprocessor_config.json"], "max_pixels": 28 * 28 * 64}
_QWEN_PARTS = {"special": QWEN.special, "template": QWEN.template}
_GLM = (*TURNS, "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>")
_GLM += ("<|begin_of_video|>", "<|end_of_video|>")
_MOE = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}


def _glm(kind: str, text: dict[str, Any] | None = None) -> dict[str, Any]:
    names = {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    part = "Glm46V" if kind == "glm46v" else "Glm4v"
    pixels = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 128}, "patch_size": 14, **HALF}
    return {
        "config": {
            "vision_config": {**QWEN_TOWER, "image_size": 56},
            "text_config": {
                **PLAIN,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [1, 1, 2],
                },
                **(text or {}),
            },
            **{key: token_id(_GLM, token) for key, token in names.items()},
        },
        "processor": {"processor_class": f"{part}Processor"},
        "pixels": {"image_processor_type": f"{part}ImageProcessor", **pixels},
        "frames": {"video_processor_type": f"{part}VideoProcessor", **pixels},
        "special": _GLM,
        "template": QWEN.template.replace(
            "<|vision_start|><|image_pad|><|vision_end|>", "<|begin_of_image|><|image|><|end_of_image|>"
        ).replace("<|vision_start|><|video_pad|><|vision_end|>", "<|begin_of_video|><|video|><|end_of_video|>"),
    }


_AYA = (*TURNS, "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>")
_AYA += ("TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 5)))
_COHERE_TEXT = {
    **TEXT_CONFIG,
    "model_type": "cohere2",
    **WINDOWED,
    "logit_scale": 0.25,
}
_OVIS = (*TURNS, "<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
_HUNYUAN = (*TURNS, "<img>", "<img_start>", "<img_end>", "<img_line>")
_KIMI = (*TURNS, "<|media_pad|>", "<|media_begin|>", "<|media_end|>", "<|media_content|>", "<|video|>")
_LIGHT = (*TURNS, "<image>", "<row>", "<end>")

MORE: dict[str, dict[str, Any]] = {
    "vipllava": {
        "config": {"vision_config": CLIP_TOWER, "image_token_index": 643, "vision_feature_layers": [-2, -1]},
        "processor": {"processor_class": "LlavaProcessor", **LLAVA_PROCESSOR},
        "pixels": {
            "image_processor_type": "CLIPImageProcessor",
            **CROP,
        },
    },
    "llava_next_video": {
        "config": {
            "vision_config": CLIP_TOWER,
            "image_token_index": 643,
            "video_token_index": 644,
            "image_grid_pinpoints": TILES,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        "processor": {"processor_class": "LlavaNextVideoProcessor", "video_token": "<video>", **LLAVA_PROCESSOR},
        "pixels": {
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": TILES,
            **CROP,
        },
        "frames": {
            "video_processor_type": "LlavaNextVideoVideoProcessor",
            **CROP,
        },
    },
    "aya_vision": {
        "config": {
            "vision_config": SIGLIP,
            "text_config": _COHERE_TEXT,
            "image_token_index": token_id(_AYA, "<|IMG_PATCH|>"),
            "downsample_factor": 2,
        },
        "processor": {
            "processor_class": "AyaVisionProcessor",
            "patch_size": 14,
            "img_size": 56,
            "downsample_factor": 2,
            "image_token": "<image>",
        },
        "pixels": GOT_PIXELS,
        "special": _AYA,
    },
    "cohere2_vision": {
        "config": {
            "vision_config": SIGLIP,
            "text_config": _COHERE_TEXT,
            "image_token_id": token_id(_AYA, "<|IMG_PATCH|>"),
            "downsample_factor": 2,
            "alignment_intermediate_size": 96,
        },
        "processor": {"processor_class": "Cohere2VisionProcessor"},
        "pixels": {
            "image_processor_type": "Cohere2VisionImageProcessor",
            "patch_size": 2,
            "downsample_factor": 2,
            "max_patches": 4,
            **SQUARE,
        },
        "special": _AYA,
        "template": LLAVA_TEMPLATE.replace("<image>", "<|IMG_PATCH|>"),
        "tokens": {
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "image_token": "<|IMG_PATCH|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
    },
    "glm4v": _glm("glm4v"),
    "glm46v": _glm("glm46v", {"model_type": "glm4v_text"}),
    "glm_ocr": _glm("glm_ocr"),
    "glm4v_moe": _glm("glm4v_moe", {**_MOE, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "qwen3_vl_moe": {
        "config": {
            "vision_config": QWEN3_TOWER,
            "text_config": {
                **PLAIN,
                **QWEN3.text,
                **_MOE,
                "num_experts": 4,
                "tie_word_embeddings": False,
            },
            **QWEN_IDS,
        },
        "processor": {"processor_class": "Qwen3VLProcessor"},
        "pixels": QWEN3.files["preprocessor_config.json"],
        "frames": QWEN3.files["video_preprocessor_config.json"],
        "special": QWEN3.special,
        "template": QWEN3.template,
    },
    "exaone4_5": {
        "config": {
            "vision_config": {**QWEN_TOWER, "num_key_value_heads": 1, "fullatt_block_indexes": [1]},
            "text_config": {
                **TEXT_CONFIG,
                "model_type": "exaone4",
                **WINDOWED,
            },
            **_IMAGE_AND_VIDEO,
        },
        "processor": {"processor_class": "Exaone4_5_Processor"},
        "pixels": _QWEN_PIXELS,
        "frames": {**_QWEN_PIXELS, "video_processor_type": "Qwen2VLVideoProcessor"},
        **_QWEN_PARTS,
    },
    "hyperclovax_vision_v2": {
        "config": {
            "vision_config": {**QWEN_TOWER, "model_type": "qwen2_5_vl_vision", "fullatt_block_indexes": [1]},
            "text_config": {**TEXT_CONFIG, "model_type": "hyperclovax"},
            **_IMAGE_AND_VIDEO,
        },
        "processor": {"processor_class": "HyperCLOVAXVisionV2Processor"},
        "pixels": _QWEN_PIXELS,
        "frames": {**_QWEN_PIXELS, "video_processor_type": "Qwen2VLVideoProcessor"},
        **_QWEN_PARTS,
    },
    "video_llama_3": {
        "config": {
            "vision_config": {**SIGHT, "model_type": "video_llama_3_vision"},
            "text_config": {**TEXT_CONFIG, "model_type": "qwen2"},
            **_IMAGE_AND_VIDEO,
        },
        "processor": {"processor_class": "VideoLlama3Processor"},
        "pixels": {
            "image_processor_type": "VideoLlama3ImageProcessor",
            "patch_size": 14,
            "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 32},
            **HALF,
        },
        "frames": {
            "video_processor_type": "VideoLlama3VideoProcessor",
            "patch_size": 14,
            "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 32},
            **HALF,
        },
        **_QWEN_PARTS,
    },
    "paddleocr_vl": {
        "config": {
            "vision_config": {**SIGHT, "model_type": "paddleocr_vl_vision"},
            "text_config": {
                **PLAIN,
                "rope_parameters": THREE_AXES,
                "tie_word_embeddings": False,
            },
            **QWEN_IDS,
        },
        "processor": {"processor_class": "PaddleOCRVLProcessor"},
        "pixels": {
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "size": AREA,
            **MERGED,
        },
        **_QWEN_PARTS,
        "tokens": {"image_token": "<|image_pad|>"},
    },
    "ovis2": {
        "config": {
            "vision_config": {**SIGHT, "vocab_size": 32, "hidden_stride": 2, "num_visual_indicator_tokens": 5},
            "text_config": {**TEXT_CONFIG, "model_type": "qwen2"},
            "image_token_id": token_id(_OVIS, "<IMG_ATOM>"),
            "visual_indicator_token_ids": [token_id(_OVIS, token) for token in _OVIS[5:]],
            "vocab_size": 672,
            "hidden_size": 64,
        },
        "processor": {"processor_class": "Ovis2Processor", "image_token": "<image>", "image_seq_length": 4},
        "pixels": {
            "image_processor_type": "Ovis2ImageProcessor",
            "size": {"height": 56, "width": 56},
            "crop_to_patches": True,
            "max_patches": 4,
            **HALF,
        },
        "special": _OVIS,
    },
    "qianfan_ocr": {
        "config": {
            "vision_config": {**SIGHT, "image_size": [56, 56], "patch_size": [14, 14]},
            "text_config": {**TEXT_CONFIG, "model_type": "qwen3"},
            "image_token_id": 643,
            "downsample_ratio": 0.5,
            "image_seq_length": 4,
        },
        "processor": {"processor_class": "QianfanOCRProcessor", "image_seq_length": 4},
        "pixels": GOT_PIXELS,
        "special": (*TURNS, "<IMG>", "<img>", "</img>", "<image>"),
        "tokens": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG>",
        },
    },
    "lighton_ocr": {
        "config": {
            "vision_config": PIXTRAL,
            "text_config": {**TEXT_CONFIG, "model_type": "qwen3"},
            "image_token_id": token_id(_LIGHT, "<image>"),
            "spatial_merge_size": 2,
        },
        "processor": {"processor_class": "LightOnOcrProcessor", "patch_size": 14, "spatial_merge_size": 2},
        "pixels": PIXTRAL_PIXELS,
        "special": _LIGHT,
        "tokens": {"image_token": "<image>", "image_break_token": "<row>", "image_end_token": "<end>"},
    },
    "hunyuan_vl": {
        "config": {
            "vision_config": {
                **SIGHT,
                "num_key_value_heads": 2,
                "out_hidden_size": 64,
                "text_hidden_size": 64,
                "max_image_size": 112,
                "min_image_size": 56,
            },
            "text_config": {
                **PLAIN,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]},
            },
            "image_token_id": token_id(_HUNYUAN, "<img>"),
            "im_start_id": token_id(_HUNYUAN, "<img_start>"),
            "im_end_id": token_id(_HUNYUAN, "<img_end>"),
            "im_newline_id": token_id(_HUNYUAN, "<img_line>"),
        },
        "processor": {"processor_class": "HunYuanVLProcessor"},
        "pixels": {
            "image_processor_type": "HunYuanVLImageProcessor",
            "size": AREA,
            **MERGED,
        },
        "special": _HUNYUAN,
        "template": LLAVA_TEMPLATE.replace("<image>", "<img_start><img><img_end>"),
        "tokens": {"image_token": "<img>", "image_start_token": "<img_start>", "image_end_token": "<img_end>"},
    },
    "kimi_k25": {
        "config": {
            "vision_config": KIMI_TOWER,
            "text_config": {
                **TEXT_CONFIG,
                "model_type": "deepseek_v3",
                **_MOE,
                "num_key_value_heads": 4,
                "kv_lora_rank": 16,
                "q_lora_rank": 16,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
            },
            "projection_hidden_size": 32,
            "image_token_id": token_id(_KIMI, "<|media_pad|>"),
            "video_token_id": token_id(_KIMI, "<|video|>"),
        },
        "processor": {"processor_class": "Kimi_K25Processor"},
        "pixels": {"image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 14, **HALF},
        "frames": {"video_processor_type": "Kimi_K25VideoProcessor", "patch_size": 14, **HALF},
        "special": _KIMI,
        "template": LLAVA_TEMPLATE.replace("<image>", "<|media_pad|>").replace("<video>", "<|video|>"),
        "tokens": {"image_token": "<|media_pad|>", "video_token": "<|video|>"},
    },
    "got_ocr2": {
        "config": {
            "vision_config": {**SAM, "image_size": 256, "patch_size": 16},
            "text_config": {**TEXT_CONFIG, "model_type": "qwen2"},
            "image_token_index": 643,
            "image_seq_length": 16,
        },
        "processor": {"processor_class": "GotOcr2Processor"},
        "pixels": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 256, "width": 256},
            "crop_to_patches": False,
            **HALF,
        },
        "special": (*TURNS, "<imgpad>", "<img>", "</img>"),
        "template": LLAVA_TEMPLATE.replace("<image>", "<imgpad>"),
    },
    "deepseek_vl": {
        "config": {
            "vision_config": {**SIGLIP, "image_size": 56},
            "text_config": TEXT_CONFIG,
            "image_token_id": 643,
        },
        "processor": {"processor_class": "DeepseekVLProcessor", "num_image_tokens": 16},
        "pixels": {
            "image_processor_type": "DeepseekVLImageProcessor",
            "min_size": 14,
            **SQUARE,
        },
        "tokens": {"image_token": "<image>"},
    },
    "janus": {
        "config": {
            "vision_config": {
                **SIGHT,
                "projection_dim": 64,
                "num_image_tokens": 16,
            },
            "vq_config": {
                "base_channels": 32,
                "num_embeddings": 16,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "latent_channels": 32,
                "num_patches": 4,
                "projection_dim": 64,
                "image_token_embed_dim": 64,
            },
            "text_config": TEXT_CONFIG,
            "image_token_id": 643,
        },
        "processor": {"processor_class": "JanusProcessor", "num_image_tokens": 16},
        "pixels": {
            "image_processor_type": "JanusImageProcessor",
            "min_size": 14,
            **SQUARE,
        },
        "tokens": {"image_token": "<image>", "boi_token": "<row>", "eoi_token": "<end>"},
    },
    "idefics2": {
        "config": {
            "vision_config": {**SIGHT, "model_type": "idefics2_vision", "image_size": 112},
            "perceiver_config": {
                "hidden_size": 64,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "num_key_value_heads": 2,
            },
            "text_config": {**TEXT_CONFIG, "model_type": "mistral", "sliding_window": None},
            "image_token_id": 643,
        },
        "processor": {"processor_class": "Idefics2Processor", "image_seq_len": 4},
        "pixels": {
            "image_processor_type": "Idefics2ImageProcessor",
            "size": {"longest_edge": 112, "shortest_edge": 56},
            "do_image_splitting": False,
            **HALF,
        },
        "tokens": {"image_token": "<image>", "image_boundary_token": "<fake>"},
    },
    "aria": {
        "config": {
            "vision_config": {**SIGHT, "model_type": "idefics3_vision", "image_size": 980, "patch_size": 140},
            "text_config": {**TEXT_CONFIG, "model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2},
            "image_token_index": 643,
            "projector_patch_to_query_dict": {49: 4},
        },
        "processor": {"processor_class": "AriaProcessor", "size_conversion": {"980": 4}},
        "pixels": {
            "image_processor_type": "AriaImageProcessor",
            "max_image_size": 980,
            "split_image": False,
            **HALF,
        },
        "tokens": {"image_token": "<image>", "unk_token": "<end>"},
    },
}
