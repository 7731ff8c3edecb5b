"""Cross-encoders, as the registry knows them: models for sequence classification with one label. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.models.cross_encoder.graph import graph
from segue.models.cross_encoder.recipe import read_activation
from segue.models.sequence_labels import classifies_sequences, labels_of
from segue.models.text_family import text_family

TINY = ("bert-cross-encoder", "qwen3-reranker")
"""The families that `segue tiny` knows."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """A checkpoint of a class for sequence classification, with one label. Raises `ConfigError` where it is not
    served."""
    if not classifies_sequences(config) or len(labels_of(config)) > 1:
        return False
    read_activation(model_dir, config)
    return True


FAMILY = text_family("cross_encoder", claims, graph, TINY, frozenset({"text_pair", "use_activation"}))
