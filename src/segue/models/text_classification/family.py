"""Classifiers of texts, as the registry knows them: models for sequence classification with several labels. No torch
here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.models.sequence_labels import classifies_sequences, labels_of
from segue.models.text_classification.graph import graph
from segue.models.text_classification.recipe import read_activation
from segue.models.text_family import text_family

TINY = ("bert-classifier", "qwen3-classifier")
"""The families that `segue tiny` knows."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """A checkpoint of a class for sequence classification, with several labels. Raises `ConfigError` where it is not
    served."""
    if not classifies_sequences(config) or len(labels_of(config)) == 1:
        return False
    read_activation(model_dir, config)
    return True


FAMILY = text_family("text_classification", claims, graph, TINY, frozenset({"use_activation"}))
