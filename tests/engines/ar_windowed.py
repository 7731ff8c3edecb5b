"""A small decoder whose layers have attention windows, under the engine."""

from __future__ import annotations

from typing import Any

from ar_adapter import SHAPE, TinyAdapter, randomise
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from segue.kernels.attention.interface import AttentionWindow, Chunked

SMALL: dict[str, Any] = {**SHAPE, "head_dim": 8}


# (model, config, changes): windows that are not whole blocks, whole blocks, two tokens
KINDS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 13}),
    "mistral, a block": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "mistral, two tokens": (MistralForCausalLM, MistralConfig, {"sliding_window": 2}),
    "gemma 2": (Gemma2ForCausalLM, Gemma2Config, {"sliding_window": 9, "query_pre_attn_scalar": 8}),
    "gemma 3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "sliding_window": 11,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "sliding_window": 10,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama 4": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            "attention_chunk_size": 16,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 1],
            "intermediate_size_mlp": 96,
            "moe_layers": [],
            "attn_temperature_tuning": False,
        },
    ),
}


class Windowed(TinyAdapter):
    """Says what its config says of windows."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        super().__init__(model, **options)
        config = model.config
        types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        self.kv.windows = tuple(_look_back(config, kind) for kind in types)


def _look_back(config: PreTrainedConfig, kind: str) -> AttentionWindow:
    if kind == "chunked_attention":
        return Chunked(config.attention_chunk_size)
    return config.sliding_window if kind == "sliding_attention" else None


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    cls, config, fields = KINDS[kind]
    model = cls(config(**{**SMALL, **fields, **changes})).eval()
    randomise(model, 1)
    return model
