"""The checkpoint a benchmark runs on: one that is given, a frozen preset made when absent, or a published shape
without weights."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from segue.models.qwen2_5_omni import tiny

SIZES = tiny.SIZES

# config.json of Qwen/Qwen2.5-Omni-7B in what decides how much there is to compute. Token ids stay those of the small
# checkpoints, whose tokenizer goes with it.
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


def make_preset(directory: Path, size: str) -> Path:
    """The preset of a size under `directory`, made if it is not there."""
    target = directory / f"qwen2.5-omni-{size}"
    if not (target / "spk_dict.pt").is_file():  # written last
        tiny.make(target, size=size)
    return target


def make_shape(directory: Path, name: str) -> Path:
    """Config, tokenizer, processor and voices of a published shape under `directory`; no weights."""
    target = directory / f"qwen2.5-omni-shape-{name}"
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        source = Path(scratch)
        tiny.make(source, size="tiny")
        for path in source.iterdir():
            if path.name not in ("config.json", "spk_dict.pt") and "safetensors" not in path.name:
                (target / path.name).write_bytes(path.read_bytes())
        config = overlay(json.loads((source / "config.json").read_text()), SHAPES[name])
        voices = torch.load(source / "spk_dict.pt", weights_only=True)
    frames = torch.randn(1, _REFERENCE_FRAMES, 80, generator=torch.Generator().manual_seed(1))
    voices = {voice: {**entry, "ref_mel": 2.0 * frames - 4.0} for voice, entry in voices.items()}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    torch.save(voices, target / "spk_dict.pt")
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
