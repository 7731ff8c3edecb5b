"""Where the networks lie in the library's model: its versions hold them in different places."""

from __future__ import annotations

from typing import Any


def language_model(model: Any) -> Any:
    inner = model.thinker.model
    return inner if hasattr(inner, "embed_tokens") else inner.language_model


def vision(model: Any) -> Any:
    thinker = model.thinker
    return thinker.visual if hasattr(thinker, "visual") else thinker.model.visual


def audio_encoder(model: Any) -> Any:
    thinker = model.thinker
    return thinker.audio_tower if hasattr(thinker, "audio_tower") else thinker.model.audio_tower
