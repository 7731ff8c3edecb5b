"""Language models that are known not to be served, from their config alone. No torch here."""

from __future__ import annotations

from typing import Any

_DRAFTERS = frozenset(("gemma4_assistant", "gemma4_unified_assistant"))
_STATE = frozenset(("linear_attention", "conv", "mamba", "mamba2", "recurrent"))
"""Layer types of models that keep a state per sequence."""
_ATTENTION = frozenset(("full_attention", "sliding_attention", "chunked_attention", "attention"))
"""Layer types that keep keys and values."""
_NEITHER = frozenset(("mlp", "moe"))
"""Layer types that keep nothing."""
ENCODER_DECODER = (
    "it is an encoder-decoder; of these, models that hear windows of sound (Whisper) are served, and no others"
)
_OUTSIDE = "its layers keep a state per sequence, and not in the library's cache, from where it could be served"
_BY_CACHE = (
    "it is the decoder of an encoder-decoder, which counts positions by its cache: one for all sequences of a batch"
)
_SHARED = "several of its layers share an attention module, which is not told for which of them it runs"
_REASONS = {
    **dict.fromkeys(("rwkv", "xlstm", "recurrent_gemma", "minimax"), _OUTSIDE),
    **dict.fromkeys(("zamba", "zamba2"), _SHARED),
    **dict.fromkeys(
        (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "marian",
            "mbart",
            "mvp",
            "pegasus",
            "plbart",
            "trocr",
        ),
        _BY_CACHE,
    ),
}
"""By model type, where nothing else in the config says it."""


def unserved(config: dict[str, Any]) -> str | None:
    """Why a causal LM's config cannot be served, where the config says it."""
    kind = str(config.get("model_type"))
    if config.get("is_encoder_decoder"):
        return ENCODER_DECODER
    if kind in _DRAFTERS:
        return "it drafts for another model, whose keys and values it attends to; it makes no text of its own"
    if config.get("prefix_lm"):
        return "the tokens of its prompts see each other in both directions (prefix_lm)"
    if kind in _REASONS:
        return _REASONS[kind]
    if others := sorted(_layer_types(config) - _ATTENTION - _STATE - _NEITHER):
        return f"it has layers of type {', '.join(others)}; the engine does full, sliding and chunked attention"
    if "auto_map" in config and config.get("model_type") is None:
        return "it is made of code of its own (auto_map), which is never run"
    return None


def _layer_types(config: dict[str, Any]) -> set[str]:
    types = config.get("layer_types") or []
    return {str(name) for name in types} if isinstance(types, list) else set()
