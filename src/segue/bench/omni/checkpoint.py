"""The checkpoints of `segue bench omni`: a frozen preset made if absent, or a published shape without weights."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from segue.models.omni.qwen2_5_omni.tiny import presets as tiny
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
SHAPES: dict[str, dict[str, Any]] = {"7b": _SHAPE_7B}
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
    target = directory / f"qwen2.5-omni-shape-{name}"
    with filled(target) as made:
        tiny.make(made, size="tiny")
        for path in made.glob("*safetensors*"):
            path.unlink()
        config = overlay(json.loads((made / "config.json").read_text()), SHAPES[name])
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        voices = torch.load(made / "spk_dict.pt", weights_only=True)
        frames = torch.randn(1, _REFERENCE_FRAMES, 80, generator=torch.Generator().manual_seed(1))
        torch.save(
            {voice: {**entry, "ref_mel": 2.0 * frames - 4.0} for voice, entry in voices.items()}, made / "spk_dict.pt"
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
