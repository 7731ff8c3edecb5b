"""What the config of a model for sequence classification says of its labels. No torch here."""

from __future__ import annotations

from typing import Any

_CLASS = "ForSequenceClassification"
"""How the names of the library's classes end."""
_DEFAULT = 2
"""Labels where the config says nothing of them, as the library has it."""


def classifies_sequences(config: dict[str, Any]) -> bool:
    """Whether a checkpoint is of a class for sequence classification."""
    return any(str(name).endswith(_CLASS) for name in config.get("architectures") or [])


def labels_of(config: dict[str, Any]) -> list[str]:
    """The names of its labels, in the order of the model's outputs."""
    named = {int(index): str(label) for index, label in (config.get("id2label") or {}).items()}
    count = config.get("num_labels") or len(named) or _DEFAULT
    return [named.get(index, f"LABEL_{index}") for index in range(count)]
