"""Shared parts of families whose networks read a text and write none: the registry entry, and labels of sequence
classifiers. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.family import Family

_CUT = frozenset({"truncate_prompt_tokens", "truncation_side"})
"""Options that truncate a text (`segue.models.shared.text.text_input`)."""


def text_family(
    name: str,
    claims: Callable[[dict[str, Any], Path], bool],
    graph: Callable[[dict[str, Any]], StageGraph],
    presets: tuple[str, ...],
    options: frozenset[str],
) -> Family:
    """The registry entry of the family in the folder `name`, which has no architecture of its own and is found by
    `claims`. `presets`: for `segue tiny`; `options`: of a request, in addition to those for truncation."""
    return Family(
        name=name,
        architectures=frozenset(),
        claims=claims,
        graph=graph,
        stages_module=f"segue.models.text.{name}.stages",
        reference_module=f"segue.models.text.{name}.reference",
        chats=lambda model_dir: False,
        options=options | _CUT,
        tiny_module=f"segue.models.text.{name}.tiny",
        tiny_names=presets,
    )


_CLASS = "ForSequenceClassification"
"""Suffix of the library's class names."""
_DEFAULT = 2
"""The library's default number of labels."""


def classifies_sequences(config: dict[str, Any]) -> bool:
    """Whether a checkpoint's class is for sequence classification."""
    return any(str(name).endswith(_CLASS) for name in config.get("architectures") or [])


def labels_of(config: dict[str, Any]) -> list[str]:
    """The names of its labels, in the order of the model's outputs."""
    named = {int(index): str(label) for index, label in (config.get("id2label") or {}).items()}
    count = config.get("num_labels") or len(named) or _DEFAULT
    return [named.get(index, f"LABEL_{index}") for index in range(count)]
