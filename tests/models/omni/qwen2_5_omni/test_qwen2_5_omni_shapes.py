"""The published shapes, without memory: every parameter of the whole model belongs to exactly one stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from qwen2_5_omni_family import published_name, published_of

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration
from segue.models.omni.qwen2_5_omni.loading import load_encoders, load_talker, load_thinker, load_token2wav

pytestmark = pytest.mark.slow

# config.json of Qwen/Qwen2.5-Omni-7B and -3B, in what decides shapes and names
IDS = {
    "audio_token_index": 151646,
    "image_token_index": 151655,
    "video_token_index": 151656,
    "audio_start_token_id": 151647,
    "audio_end_token_id": 151648,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "pad_token_id": 151643,
}
ROPE = {
    "rope_theta": 1000000.0,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
}


def published(text: dict[str, Any], talker: dict[str, Any]) -> dict[str, Any]:
    hidden = text["hidden_size"]
    return {
        "architectures": ["Qwen2_5OmniModel"],
        "model_type": "qwen2_5_omni",
        "enable_audio_output": True,
        "thinker_config": {
            **IDS,
            "bos_token_id": 151644,
            "eos_token_id": 151645,
            "text_config": {**ROPE, **text, "rms_norm_eps": 1e-06, "max_position_embeddings": 32768},
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": hidden,
                "patch_size": 14,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "window_size": 112,
            },
            "audio_config": {
                "d_model": 1280,
                "encoder_layers": 32,
                "encoder_attention_heads": 20,
                "encoder_ffn_dim": 5120,
                "num_mel_bins": 128,
                "output_dim": hidden,
            },
        },
        "talker_config": {
            **{name: IDS[name] for name in ("audio_token_index", "image_token_index", "video_token_index")},
            **ROPE,
            "vocab_size": 8448,
            "embedding_size": hidden,
            "hidden_size": 896,
            "num_hidden_layers": 24,
            **talker,
        },
        "token2wav_config": {
            "dit_config": {"hidden_size": 1024, "num_hidden_layers": 22, "num_attention_heads": 16},
            "bigvgan_config": {"upsample_initial_channel": 1536},
        },
    }


CONFIGS = {
    "7B": published(
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        {"intermediate_size": 18944, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128},
    ),
    "3B": published(
        {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
        {"intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64},
    ),
}
PARAMETERS = {"7B": (10.4e9, 11.0e9), "3B": (5.0e9, 6.1e9)}


LOADERS: dict[str, Any] = {
    "encoder": load_encoders,
    "thinker": load_thinker,
    "talker": load_talker,
    "vocoder": load_token2wav,
}


def parts(config: Qwen2_5OmniConfig) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each stage, without memory, by their published names."""
    found = {}
    for stage, load in LOADERS.items():
        context = AutoregressiveContext(Path(), stage, torch.device("meta"), torch.bfloat16, load_format="dummy")
        found[stage] = published_of(stage, load(context, config))
    return found


@pytest.mark.parametrize("size", CONFIGS)
def test_every_parameter_has_a_home(size: str) -> None:
    config = Qwen2_5OmniConfig(**CONFIGS[size])
    with torch.device("meta"):
        whole = Qwen2_5OmniForConditionalGeneration(config)
        wanted = {published_name(name): tensor.shape for name, tensor in whole.state_dict().items()}
    stages = {stage: {name: tensor.shape for name, tensor in of.items()} for stage, of in parts(config).items()}
    homes = [name for names in stages.values() for name in names]
    assert len(homes) == len(set(homes)), "a tensor is loaded by two stages"
    assert {name: shape for names in stages.values() for name, shape in names.items()} == wanted
    low, high = PARAMETERS[size]
    assert low < sum(shape.numel() for shape in wanted.values()) < high
    assert all(names for names in stages.values())


def test_the_thinker_holds_no_encoder_and_the_encoder_no_decoder() -> None:
    stages = parts(Qwen2_5OmniConfig(**CONFIGS["3B"]))
    assert all(name.startswith(("thinker.model.", "thinker.lm_head.")) for name in stages["thinker"])
    assert all(name.startswith(("thinker.visual.", "thinker.audio_tower.")) for name in stages["encoder"])
