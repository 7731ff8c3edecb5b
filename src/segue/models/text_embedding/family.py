"""Models of text embeddings, as the registry knows them: what sentence-transformers has written. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.models.text_embedding.graph import graph
from segue.models.text_embedding.recipe import MODULES, read_recipe
from segue.models.text_family import text_family

TINY = ("bert", "qwen3-embedding")
"""The families that `segue tiny` knows."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """A checkpoint with `modules.json`. Raises `ConfigError` where that asks for what is not served."""
    if not (model_dir / MODULES).is_file():
        return False
    read_recipe(model_dir, config)
    return True


FAMILY = text_family("text_embedding", claims, graph, TINY, frozenset({"dimensions"}))
