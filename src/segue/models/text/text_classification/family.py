"""Registers text classifiers: sequence classification models with several labels. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.models.shared.text.family import classifies_sequences, labels_of, text_family
from segue.models.text.text_classification.graph import graph
from segue.models.text.text_classification.recipe import read_activation

TINY = ("bert-classifier", "qwen3-classifier")
"""The families that `segue tiny` can make."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """Whether the checkpoint's class is for sequence classification, with several labels. Raises `ConfigError` if it is
    unsupported."""
    if not classifies_sequences(config) or len(labels_of(config)) == 1:
        return False
    read_activation(model_dir, config)
    return True


FAMILY = text_family("text_classification", claims, graph, TINY, frozenset({"use_activation"}))
