"""Detect models that Segue cannot serve, from their config alone. No torch here."""

from __future__ import annotations

from typing import Any

_DRAFTERS = frozenset(("gemma4_assistant", "gemma4_unified_assistant"))
_STATE = frozenset(("linear_attention", "conv", "mamba", "mamba2", "recurrent"))
"""Layer types of models that keep a state per sequence."""
_ATTENTION = frozenset(("full_attention", "sliding_attention", "chunked_attention", "attention"))
"""Layer types that keep keys and values."""
_NEITHER = frozenset(("mlp", "moe"))
"""Layer types that keep nothing between tokens."""
ENCODER_DECODER = "it is an encoder-decoder; of these, only models that transcribe audio windows (Whisper) are served"
_OUTSIDE = "its layers keep a state per sequence, but not in the library's cache"
_BY_CACHE = (
    "it is the decoder of an encoder-decoder, which counts positions by its cache: one position for all sequences of a "
    "batch"
)
_SHARED = "several of its layers share an attention module, which cannot tell for which of them it runs"
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
"""By model type, if nothing else in the config shows it."""

SPEAKERS = frozenset(
    (
        "BarkModel",
        "DiaForConditionalGeneration",
        "FastSpeech2ConformerModel",
        "FastSpeech2ConformerWithHifiGan",
        "GradiumPhononTTSForConditionalGeneration",
        "MoshiForConditionalGeneration",
        "MusicgenForConditionalGeneration",
        "MusicgenMelodyForConditionalGeneration",
        "ParlerTTSForConditionalGeneration",
        "PocketTtsModel",
        "SeamlessM4TForSpeechToSpeech",
        "SeamlessM4TForTextToSpeech",
        "SeamlessM4TModel",
        "SeamlessM4Tv2ForSpeechToSpeech",
        "SeamlessM4Tv2ForTextToSpeech",
        "SeamlessM4Tv2Model",
        "SpeechT5ForSpeechToSpeech",
        "SpeechT5ForTextToSpeech",
        "VibeVoiceForConditionalGeneration",
        "VitsModel",
    )
)
"""Classes that make speech or music, unless a family names them. Some look like models that understand audio."""


def unserved(config: dict[str, Any]) -> str | None:
    """The reason why a causal LM cannot be served, None if its config shows none."""
    kind = str(config.get("model_type"))
    if config.get("is_encoder_decoder"):
        return ENCODER_DECODER
    if kind in _DRAFTERS:
        return "it drafts for another model, whose keys and values it attends to; it generates no text by itself"
    if config.get("prefix_lm"):
        return "its prompts are bidirectional (prefix_lm)"
    if kind in _REASONS:
        return _REASONS[kind]
    if others := sorted(_layer_types(config) - _ATTENTION - _STATE - _NEITHER):
        return f"it has layers of type {', '.join(others)}; the engine supports full, sliding and chunked attention"
    if "auto_map" in config and config.get("model_type") is None:
        return "its checkpoint brings its own code (auto_map), which Segue never runs"
    return None


def _layer_types(config: dict[str, Any]) -> set[str]:
    types = config.get("layer_types") or []
    return {str(name) for name in types} if isinstance(types, list) else set()
