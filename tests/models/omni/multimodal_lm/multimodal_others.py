"""Tiny checkpoints of further families, to show that the generic family is generic."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from multimodal_parts import (
    CLIP_TOWER,
    CROP,
    GOT_PIXELS,
    HALF,
    LLAVA_PROCESSOR,
    LLAVA_TEMPLATE,
    PIXTRAL,
    PIXTRAL_PIXELS,
    QWEN,
    QWEN_IDS,
    SIGHT,
    TEXT_CONFIG,
    TILES,
    TURNS,
    token_id,
)

from segue.models.shared.library import AutoConfig, AutoModelForMultimodalLM, GenerationConfig
from segue.models.shared.tiny.files import BASE_VOCAB, added_tokens, speakable, train_tokenizer, write_json
from segue.models.shared.tiny.weights import prefer, randomise
from selection import daily

_SPECIAL = (
    *TURNS,
    *("<image>", "<video>", "<row>", "<end>", "<fake>", "<global>", "<img>", "</img>"),
)
_IMAGE = token_id(_SPECIAL, "<image>")
_PAD, _END = BASE_VOCAB, BASE_VOCAB + 2

OTHERS: dict[str, dict[str, Any]] = {
    "llava": {
        "config": {
            "vision_config": CLIP_TOWER,
            "image_token_index": _IMAGE,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        "processor": {"processor_class": "LlavaProcessor", **LLAVA_PROCESSOR},
        "pixels": {"image_processor_type": "CLIPImageProcessor", "do_resize": True, **CROP},
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
        "pixels": {
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": TILES,
            "do_resize": True,
            **CROP,
        },
    },
    "mistral3": {
        "config": {
            "vision_config": PIXTRAL,
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
        "pixels": PIXTRAL_PIXELS,
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
        "pixels": GOT_PIXELS,
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
            "text_config": {**TEXT_CONFIG, "model_type": "qwen2_vl_text", **QWEN.text},
            **QWEN_IDS,
        },
        "processor": {"processor_class": "Qwen2VLProcessor"},
        "pixels": {**QWEN.files["preprocessor_config.json"], "processor_class": "Qwen2VLProcessor"},
        "special": QWEN.special,
        "template": QWEN.template,
    },
}


def with_needs(served: dict[str, dict[str, Any]], kept: Collection[str]) -> list[Any]:
    """Parameters as `selection.daily` has them; those are marked whose library model needs a package that Segue does
    without."""
    needy = {name: made["needs"] for name, made in served.items() if "needs" in made}
    others = daily(sorted(served.keys() - needy.keys()), kept)
    return [*others, *(pytest.param(name, marks=pytest.mark.needs(needy[name])) for name in sorted(needy))]


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
    write_json(directory, "chat_template.json", {"chat_template": made.get("template", LLAVA_TEMPLATE)})
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
