"""Language models that are known not to be served, from their config alone. No torch here."""

from __future__ import annotations

from typing import Any

_STATE_SPACE = frozenset(
    (
        *("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "jamba", "bamba", "zamba", "zamba2", "falcon_h1"),
        *("nemotron_h", "recurrent_gemma", "minimax", "qwen3_next", "lfm2", "lfm2_moe", "olmo_hybrid"),
    )
)
_STATE = frozenset(("linear_attention", "conv", "mamba", "mamba2", "recurrent"))
"""Layer types of models that keep a state per sequence."""
_ATTENTION = frozenset(("full_attention", "sliding_attention", "attention"))
"""Layer types that keep keys and values."""


def unserved(config: dict[str, Any]) -> str | None:
    """Why a causal LM's config cannot be served, where the config says it."""
    kind = config.get("model_type")
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder; there is no cross-attention in the engine"
    if "chunked_attention" in (layers := _layer_types(config)) or kind in ("llama4", "llama4_text"):
        return "its layers attend in chunks, which its masks say and its attention is not told"
    others = sorted(layers - _ATTENTION)
    if kind in _STATE_SPACE or others:
        if others and not _STATE & set(others):
            return f"it has layers of type {', '.join(others)}; the engine does full and sliding attention"
        what = f"it has layers of type {', '.join(others)}" if others else f"{kind} is a state-space or hybrid model"
        return f"{what}: they keep a state per sequence, not keys and values"
    if "auto_map" in config and kind is None:
        return "it is made of code of its own (auto_map), which is never run"
    return None


def _layer_types(config: dict[str, Any]) -> set[str]:
    types = config.get("layer_types") or []
    return {str(name) for name in types} if isinstance(types, list) else set()
