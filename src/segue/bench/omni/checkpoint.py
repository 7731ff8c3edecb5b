"""The checkpoints of `segue bench omni`: a frozen preset made if absent, or a published shape without weights."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from segue.models.registry import tiny_preset
from segue.models.shared.tiny.made import filled

# the entries of Qwen/Qwen2.5-Omni-7B's config.json that determine compute. Token ids stay those of the tiny
# checkpoints, whose tokenizer is used with it
_ROPE = {"rope_theta": 1000000.0, "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default"}}
_SHAPE_7B: dict[str, Any] = {
    "dtype": "bfloat16",
    "thinker_config": {
        "text_config": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_window_layers": 28,
            **_ROPE,
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "audio_config": {
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "output_dim": 3584,
        },
    },
    "talker_config": {
        "vocab_size": 8448,
        "embedding_size": 3584,
        "hidden_size": 896,
        "intermediate_size": 18944,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_window_layers": 28,
        "tts_codec_pad_token_id": 8292,
        "tts_codec_start_token_id": 8293,
        "tts_codec_end_token_id": 8294,
        "tts_codec_mask_token_id": 8296,
        **_ROPE,
    },
    "token2wav_config": {
        "dit_config": {
            "hidden_size": 1024,
            "num_hidden_layers": 22,
            "num_attention_heads": 16,
            "head_dim": 64,
            "emb_dim": 512,
            "look_ahead_layers": [10],
            "look_backward_layers": [0, 20],
            "num_embeds": 8193,
            "enc_dim": 128,
            "enc_channels": [256, 256, 256, 256, 768],
            "enc_attention_channels": 64,
            "enc_se_channels": 64,
        },
        "bigvgan_config": {"upsample_initial_channel": 1536},
    },
}
_ROPE_3 = {
    "rope_theta": 1000000,
    "rope_scaling": {"interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default", "type": "default"},
}
# the same of Qwen/Qwen3-Omni-30B-A3B-Instruct
_SHAPE_30B: dict[str, Any] = {
    "dtype": "bfloat16",
    "thinker_config": {
        "text_config": {
            "vocab_size": 152064,
            "hidden_size": 2048,
            "intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            **_ROPE_3,
        },
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        "audio_config": {
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "downsample_hidden_size": 480,
            "output_dim": 2048,
        },
    },
    "talker_config": {
        "accept_hidden_layer": 24,
        "thinker_hidden_size": 2048,
        "num_code_groups": 16,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
        "text_config": {
            "vocab_size": 3072,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 384,
            "shared_expert_intermediate_size": 768,
            **_ROPE_3,
        },
        "code_predictor_config": {
            "vocab_size": 2048,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 5,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_code_groups": 16,
        },
    },
    "code2wav_config": {
        "codebook_size": 2048,
        "num_quantizers": 16,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "decoder_dim": 1536,
    },
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "7b": ("qwen2.5-omni", _SHAPE_7B),
    "30b-a3b": ("qwen3-omni", _SHAPE_30B),
}
"""Name of a published shape → (preset whose other files it takes, what differs in its config)."""
_REFERENCE_FRAMES = 300
"""Mel frames of the voice's sample: 3 s."""


def make_preset(directory: Path, size: str, name: str = "qwen2.5-omni") -> Path:
    """The preset of a name and size under `directory`, made if absent. Raises `InvalidRequest` for an unknown size."""
    preset = tiny_preset(name)
    target = directory / f"{name}-{size}"
    if not (target / "vocab.json").is_file():  # the file that is moved there last
        with filled(target) as made:
            preset.make(made, size, 0)
    return target


def make_shape(directory: Path, name: str) -> Path:
    """Write config, tokenizer, processor and voices of a published shape under `directory`, without weights."""
    preset, shape = SHAPES[name]
    target = directory / f"{preset}-shape-{name}"
    with filled(target) as made:
        tiny_preset(preset).make(made, "tiny", 0)
        for path in made.glob("*safetensors*"):
            path.unlink()
        config = overlay(json.loads((made / "config.json").read_text()), shape)
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if (made / "spk_dict.pt").exists():
            voices = torch.load(made / "spk_dict.pt", weights_only=True)
            frames = torch.randn(1, _REFERENCE_FRAMES, 80, generator=torch.Generator().manual_seed(1))
            torch.save(
                {voice: {**entry, "ref_mel": 2.0 * frames - 4.0} for voice, entry in voices.items()},
                made / "spk_dict.pt",
            )
    return target


def overlay(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above`, objects merged key by key."""
    merged = deepcopy(below)
    for key, value in above.items():
        inner = merged.get(key)
        if isinstance(value, dict) and isinstance(inner, dict) and key != "rope_scaling":
            merged[key] = overlay(inner, value)
        else:
            merged[key] = deepcopy(value)
    return merged
