"""What a cross-encoder's config says of its score. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError

ARCHITECTURE = "ForSequenceClassification"
"""How the names of the library's classes end."""
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "identity"}


def read_activation(model_dir: Path, config: dict[str, Any]) -> str:
    """What becomes of the logit, `sigmoid` (where the config says nothing) or `identity`, as sentence-transformers
    reads and writes it. Raises `ConfigError` for a model that gives more than one number, or another activation."""
    path = model_dir / "config.json"
    labels = config.get("num_labels") or len(config.get("id2label") or ("LABEL_0", "LABEL_1"))
    if labels != 1:
        raise ConfigError(
            f"{path}: the model sorts into {labels} labels; of models for sequence classification, those with one "
            "(cross-encoders) are served",
            field="model",
        )
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
