"""Cross-encoders, as the registry knows them: models for sequence classification with one label. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.models.cross_encoder.graph import graph
from segue.models.cross_encoder.recipe import read_activation
from segue.models.family import CUT_OPTIONS, Family
from segue.models.sequence_labels import classifies_sequences, labels_of

TINY = ("bert-cross-encoder", "qwen3-reranker")
"""The families that `segue tiny` knows."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """A checkpoint of a class for sequence classification, with one label. Raises `ConfigError` where it is not
    served."""
    if not classifies_sequences(config) or len(labels_of(config)) > 1:
        return False
    read_activation(model_dir, config)
    return True


FAMILY = Family(
    name="cross_encoder",
    architectures=frozenset(),
    claims=claims,
    graph=graph,
    stages_module="segue.models.cross_encoder.stages",
    chats=lambda model_dir: False,
    options=frozenset({"text_pair", "use_activation", *CUT_OPTIONS}),
    tiny_module="segue.models.cross_encoder.tiny",
    tiny_names=TINY,
)
