"""Models of text embeddings, as the registry knows them: what sentence-transformers has written. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.models.family import CUT_OPTIONS, Family
from segue.models.text_embedding.graph import graph
from segue.models.text_embedding.recipe import MODULES, read_recipe

TINY = ("bert", "qwen3-embedding")
"""The families that `segue tiny` knows."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """A checkpoint with `modules.json`. Raises `ConfigError` where that asks for what is not served."""
    if not (model_dir / MODULES).is_file():
        return False
    read_recipe(model_dir, config)
    return True


FAMILY = Family(
    name="text_embedding",
    architectures=frozenset(),
    claims=claims,
    graph=graph,
    stages_module="segue.models.text_embedding.stages",
    chats=lambda model_dir: False,
    options=frozenset({"dimensions", *CUT_OPTIONS}),
    tiny_module="segue.models.text_embedding.tiny",
    tiny_names=TINY,
)
