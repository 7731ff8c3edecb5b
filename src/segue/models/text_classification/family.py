"""Classifiers of texts, as the registry knows them: models for sequence classification with several labels. No torch
here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.models.family import CUT_OPTIONS, Family
from segue.models.sequence_labels import classifies_sequences, labels_of
from segue.models.text_classification.graph import graph
from segue.models.text_classification.recipe import read_activation

TINY = ("bert-classifier", "qwen3-classifier")
"""The families that `segue tiny` knows."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """A checkpoint of a class for sequence classification, with several labels. Raises `ConfigError` where it is not
    served."""
    if not classifies_sequences(config) or len(labels_of(config)) == 1:
        return False
    read_activation(model_dir, config)
    return True


FAMILY = Family(
    name="text_classification",
    architectures=frozenset(),
    claims=claims,
    graph=graph,
    stages_module="segue.models.text_classification.stages",
    chats=lambda model_dir: False,
    options=frozenset({"use_activation", *CUT_OPTIONS}),
    tiny_module="segue.models.text_classification.tiny",
    tiny_names=TINY,
)
