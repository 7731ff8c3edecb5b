"""The published shapes, without memory: every parameter of the whole model belongs to exactly one stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen2_5_omni_family import published_name, published_of

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration
from segue.models.omni.qwen2_5_omni.loading import load_encoders, load_talker, load_thinker, load_token2wav

pytestmark = pytest.mark.slow

PUBLISHED = Path(__file__).parents[2] / "published" / "Qwen2.5-Omni-3B" / "config.json"


def of_7b(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the 7B model, from that of the 3B, with which it has all else in common."""
    thinker, talker = config["thinker_config"], config["talker_config"]
    thinker["text_config"] |= {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    }
    thinker["vision_config"]["out_hidden_size"] = thinker["audio_config"]["output_dim"] = 3584
    talker |= {
        "embedding_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    talker["rope_scaling"]["mrope_section"] = [16, 24, 24]
    return config


CONFIGS = {"7B": of_7b(json.loads(PUBLISHED.read_text())), "3B": json.loads(PUBLISHED.read_text())}
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
