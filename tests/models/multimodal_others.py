"""Tiny checkpoints of further families, to show that the generic family is generic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from segue.models.library import AutoConfig, AutoModelForMultimodalLM, GenerationConfig
from segue.models.multimodal_lm.tiny_config import SMALL
from segue.models.tiny.files import BASE_VOCAB, added_tokens, speakable, train_tokenizer, write_json
from segue.models.tiny.weights import prefer, randomise

_QWEN = SMALL["qwen2.5-vl"]
_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>", "<row>", "<end>", "<fake>", "<global>"),
    *("<img>", "</img>"),
)
_IMAGE = BASE_VOCAB + _SPECIAL.index("<image>")
_PAD, _END = BASE_VOCAB, BASE_VOCAB + 2
TEXT_CONFIG = {
    "model_type": "llama",
    "vocab_size": 672,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
CLIP_TOWER = {**SIGHT, "model_type": "clip_vision_model", "projection_dim": 32}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_CROP = {"do_resize": True, "size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, **HALF}
LLAVA_PROCESSOR = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
}
TILES = [[56, 112], [112, 56], [112, 112]]

OTHERS: dict[str, dict[str, Any]] = {
    "llava": {
        "config": {
            "vision_config": CLIP_TOWER,
            "image_token_index": _IMAGE,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        "processor": {"processor_class": "LlavaProcessor", **LLAVA_PROCESSOR},
        "pixels": {"image_processor_type": "CLIPImageProcessor", **_CROP},
    },
    "llava_next": {
        "config": {
            "vision_config": CLIP_TOWER,
            "image_token_index": _IMAGE,
            "image_grid_pinpoints": TILES,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        "processor": {"processor_class": "LlavaNextProcessor", **LLAVA_PROCESSOR},
        "pixels": {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": TILES, **_CROP},
    },
    "mistral3": {
        "config": {
            "vision_config": {**SIGHT, "model_type": "pixtral", "image_size": 112, "head_dim": 16},
            "text_config": {**TEXT_CONFIG, "model_type": "mistral"},
            "image_token_index": _IMAGE,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        "processor": {
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "spatial_merge_size": 2,
            "image_token": "<image>",
            "image_break_token": "<row>",
            "image_end_token": "<end>",
        },
        "pixels": {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 112},
            "patch_size": 28,
            **HALF,
        },
    },
    "idefics3": {
        "config": {
            "vision_config": {**SIGHT, "model_type": "idefics3_vision"},
            "image_token_id": _IMAGE,
            "scale_factor": 2,
        },
        "processor": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        "pixels": {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56},
            **HALF,
        },
        "tokens": {
            "image_token": "<image>",
            "fake_image_token": "<fake>",
            "global_image_token": "<global>",
            "end_of_utterance_token": "<end>",
            "image_boundary_token": "<fake>",
        },
    },
    "internvl": {
        "config": {
            "vision_config": {
                **SIGHT,
                "model_type": "internvl_vision",
                "image_size": [56, 56],
                "patch_size": [14, 14],
            },
            "text_config": {**TEXT_CONFIG, "model_type": "qwen2"},
            "image_token_id": _IMAGE,
            "downsample_ratio": 0.5,
        },
        "processor": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        "pixels": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 56, "width": 56},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            **HALF,
        },
        "tokens": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<image>",
            "video_token": "<video>",
        },
    },
    "qwen2_vl": {
        "config": {
            "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
            "text_config": {**TEXT_CONFIG, "model_type": "qwen2_vl_text", **_QWEN.text},
            **{key: _QWEN.id_of(token) for key, token in _QWEN.ids.items()},
        },
        "processor": {"processor_class": "Qwen2VLProcessor"},
        "pixels": {**_QWEN.files["preprocessor_config.json"], "processor_class": "Qwen2VLProcessor"},
        "special": _QWEN.special,
        "template": _QWEN.template,
    },
}


def make(name: str, directory: Path, made: dict[str, Any]) -> Path:
    """A checkpoint of model type `name` with random weights. `made`: one of `OTHERS`, or like them."""
    special = made.get("special", _SPECIAL)
    tokens = made.get("tokens", {})
    tokenizer = train_tokenizer(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {
        "added_tokens_decoder": added_tokens(tokenizer, special),
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "extra_special_tokens": tokens,
        **tokens,
    }
    write_json(directory, "tokenizer_config.json", named)
    write_json(
        directory, "chat_template.json", {"chat_template": made.get("template", SMALL["llava-onevision"].template)}
    )
    write_json(directory, "processor_config.json", made["processor"])
    write_json(
        directory,
        "preprocessor_config.json",
        {"processor_class": made["processor"]["processor_class"], **made["pixels"]},
    )
    if "frames" in made:
        write_json(directory, "video_preprocessor_config.json", dict(made["frames"]))
    config = AutoConfig.for_model(name, **{"text_config": TEXT_CONFIG, "tie_word_embeddings": False, **made["config"]})
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, 0)
    prefer(model, speakable(tokenizer), _END, 1.5)
    model.generation_config = GenerationConfig(eos_token_id=[_END, _PAD], pad_token_id=_PAD, bos_token_id=None)
    model.save_pretrained(directory)
    return directory
