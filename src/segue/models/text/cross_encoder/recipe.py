"""Read from a cross-encoder's config how it computes the score. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError

_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "identity"}


def read_activation(model_dir: Path, config: dict[str, Any]) -> str:
    """The activation of the logit, `sigmoid` (the default) or `identity`, in the format of sentence-transformers.
    Raises `ConfigError` for another activation."""
    path = model_dir / "config.json"
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{path}: an encoder-decoder is not served as a cross-encoder", field="model")
    own = config.get("sentence_transformers") or {}
    named = own.get("activation_fn") or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(named).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise ConfigError(
            f"{path}: activation {named!r} is not served; {' and '.join(_ACTIVATIONS)} are", field="model"
        )
    return _ACTIVATIONS[kind]
