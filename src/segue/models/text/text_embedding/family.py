"""Registers text embedding models in the format of sentence-transformers. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.models.shared.text.family import text_family
from segue.models.text.text_embedding.graph import graph
from segue.models.text.text_embedding.recipe import MODULES, read_recipe

TINY = ("bert", "qwen3-embedding")
"""The families that `segue tiny` can make."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """Whether the checkpoint has `modules.json`. Raises `ConfigError` if that lists unsupported modules."""
    if not (model_dir / MODULES).is_file():
        return False
    read_recipe(model_dir, config)
    return True


FAMILY = text_family("text_embedding", claims, graph, TINY, frozenset({"dimensions"}))
