"""Published configs without weights: the parts of `config.json` that determine compute. For `--load-format dummy`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segue.models.shared.tiny.files import write_json
from segue.models.shared.tiny.made import filled

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = {
    **_QWEN2,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "max_position_embeddings": 40960,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-7b": {
        **_QWEN2,
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen3-30b-a3b": {
        **_QWEN3_MOE,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "tiny": {
        **_QWEN2,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "tiny-moe": {
        **_QWEN3_MOE,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}


def write_shape(directory: Path, name: str) -> Path:
    """Write the config of one of `SHAPES` to a new directory under `directory`."""
    target = directory / f"shape-{name}"
    with filled(target) as made:
        write_json(made, "config.json", dict(SHAPES[name]))
    return target
