"""Tiny checkpoints of families of further processors, in the form of `multimodal_others`."""

from __future__ import annotations

from typing import Any

from multimodal_parts import (
    CLIP_TOWER,
    CROP,
    HALF,
    LLAVA_PROCESSOR,
    PLAIN,
    SAM,
    SIGHT,
    SIGLIP,
    SQUARE,
    TEXT_CONFIG,
    TILES,
    TURNS,
    token_id,
)

from segue.models.shared.tiny.files import BASE_VOCAB

_DOCLING = (*TURNS, "<image>", "<fake_token_around_image>", "<global-img>")
_DOCLING += tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))


_GRANITE = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "pad_token_id": BASE_VOCAB,
}


NEWER: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "needs": "num2words",
        "config": {
            "vision_config": {**SIGHT, "model_type": "smolvlm_vision"},
            "image_token_id": 643,
            "scale_factor": 2,
        },
        "processor": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        "pixels": {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56},
            **HALF,
        },
        "frames": {
            "video_processor_type": "SmolVLMVideoProcessor",
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 56},
            "video_sampling": {"fps": 1, "max_frames": 4, "video_size": {"longest_edge": 56}},
            "fps": 1,
            "num_frames": 4,
            **HALF,
        },
        "tokens": {
            "image_token": "<image>",
            "video_token": "<video>",
            "fake_image_token": "<fake>",
            "global_image_token": "<global>",
            "end_of_utterance_token": "<end>",
        },
    },
    "video_llava": {
        "config": {
            "vision_config": CLIP_TOWER,
            "image_token_index": 643,
            "video_token_index": 644,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        "processor": {"processor_class": "VideoLlavaProcessor", "video_token": "<video>", **LLAVA_PROCESSOR},
        "pixels": {"image_processor_type": "VideoLlavaImageProcessor", **CROP},
        "frames": {"video_processor_type": "VideoLlavaVideoProcessor", **CROP},
    },
    "granite_docling": {
        "config": {
            "vision_config": {
                **SIGHT,
                "out_hidden_size": 64,
                "scale_factor": 2,
                "deepstack_visual_indexes": [0],
            },
            "text_config": {**PLAIN, **_GRANITE},
            "image_token_id": token_id(_DOCLING, "<image>"),
        },
        "processor": {"processor_class": "GraniteDoclingProcessor", "image_seq_len": 4},
        "pixels": {
            "image_processor_type": "GraniteDoclingImageProcessor",
            "max_patches": 4,
            **SQUARE,
        },
        "special": _DOCLING,
        "tokens": {"image_token": "<image>"},
    },
    "granite4_vision": {
        "config": {
            "vision_config": {**SIGLIP, "hidden_size": 64, "num_attention_heads": 1, "patch_size": 7},
            "text_config": {**PLAIN, "attention_multiplier": 0.25},
            "image_token_index": 643,
            "image_grid_pinpoints": TILES,
            "vision_feature_select_strategy": "full",
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-1, 0]],
            "spatial_target_layers": [1],
            "qformer_config": {"num_hidden_layers": 1, "intermediate_size": 64, "model_type": "blip_2_qformer"},
        },
        "processor": {
            "processor_class": "Granite4VisionProcessor",
            "patch_size": 7,
            "vision_feature_select_strategy": "full",
            "downsample_rate": "1/2",
        },
        "pixels": {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": TILES, **CROP},
    },
    "shieldgemma2": {
        "config": {
            "vision_config": SIGLIP,
            "text_config": {**PLAIN, "sliding_window": 24},
            "image_token_index": 643,
            "mm_tokens_per_image": 4,
        },
        "processor": {"processor_class": "ShieldGemma2Processor", "image_seq_length": 4},
        "pixels": {"image_processor_type": "Gemma3ImageProcessor", **SQUARE},
        "tokens": {
            "image_token": "<image>",
            "boi_token": "<img>",
            "eoi_token": "</img>",
        },
    },
    "deepseek_vl_hybrid": {
        "config": {
            "vision_config": {**SIGLIP, "image_size": 56},
            "high_res_vision_config": {**SAM, "image_size": 128, "patch_size": 16},
            "image_token_id": 643,
        },
        "processor": {"processor_class": "DeepseekVLHybridProcessor", "num_image_tokens": 16},
        "pixels": {
            "image_processor_type": "DeepseekVLHybridImageProcessor",
            "size": {"height": 56, "width": 56},
            "high_res_size": {"height": 128, "width": 128},
            "min_size": 14,
            **HALF,
        },
        "tokens": {"image_token": "<image>"},
    },
    "fast_vlm": {
        "needs": "timm",
        "config": {
            "vision_config": {
                "architecture": "fastvit_t8",
                "do_pooling": True,
                "hidden_size": 64,
                "num_classes": 32,
                "model_args": {"layers": [1, 1, 1, 1], "embed_dims": [16, 16, 16, 32], "inference_mode": True},
            },
            "text_config": {**TEXT_CONFIG, "model_type": "qwen2"},
            "image_token_index": 643,
        },
        "processor": {
            "processor_class": "LlavaProcessor",
            "patch_size": 32,
            "vision_feature_select_strategy": "full",
            "image_token": "<image>",
            "num_additional_image_tokens": 0,
        },
        "pixels": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 128},
            "crop_size": {"height": 128, "width": 128},
            **HALF,
        },
    },
    "perception_lm": {
        "needs": "timm",
        "config": {
            "vision_config": {
                "architecture": "vit_pe_core_large_patch14_336",
                "do_pooling": True,
                "num_classes": 32,
                "hidden_size": 32,
                "model_args": {
                    "embed_dim": 32,
                    "depth": 2,
                    "num_heads": 2,
                    "img_size": [56, 56],
                    "global_pool": "",
                    "use_post_transformer_norm": False,
                    "init_values": 0.1,
                    "ref_feat_shape": (4, 4),
                },
            },
            "vision_use_cls_token": True,
            "projector_pooling_ratio": 2,
            "image_token_id": 643,
            "video_token_id": 644,
        },
        "processor": {"processor_class": "PerceptionLMProcessor", "patch_size": 14, "pooling_ratio": 2},
        "pixels": {"image_processor_type": "PerceptionLMImageProcessor", "tile_size": 56, "max_num_tiles": 4, **HALF},
        "frames": {
            "video_processor_type": "PerceptionLMVideoProcessor",
            **SQUARE,
        },
        "tokens": {"image_token": "<image>", "video_token": "<video>"},
    },
}
