"""Read from a classifier's config how its logits become numbers per class. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from segue.messages.errors import ConfigError, nearest

Activation = Literal["softmax", "sigmoid", "identity"]
_ACTIVATIONS: dict[str | None, Activation] = {
    None: "softmax",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "identity",
}
"""`problem_type` → the activation of the logits, as in the library's pipeline."""


def read_activation(model_dir: Path, config: dict[str, Any]) -> Activation:
    """The activation of the logits. Raises `ConfigError` for an unsupported model."""
    path = model_dir / "config.json"
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{path}: an encoder-decoder is not served as a classifier", field="model")
    kind = config.get("problem_type")
    if kind not in _ACTIVATIONS:
        known = [name for name in _ACTIVATIONS if name is not None]
        hint = nearest(kind, known) if isinstance(kind, str) else f"; known: {', '.join(known)}"
        raise ConfigError(f"{path}: problem_type is {kind!r}, which is not served{hint}", field="model")
    return _ACTIVATIONS[kind]
