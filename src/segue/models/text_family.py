"""What the families of networks that read a text and write none have in common. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.family import Family

_CUT = frozenset({"truncate_prompt_tokens", "truncation_side"})
"""Where a text is cut (`segue.models.text_cut`)."""


def text_family(
    name: str,
    claims: Callable[[dict[str, Any], Path], bool],
    graph: Callable[[dict[str, Any]], StageGraph],
    presets: tuple[str, ...],
    options: frozenset[str],
) -> Family:
    """A family in the folder of its name: no class of the library is its own, so it is found by what it claims.
    `presets`: of `segue tiny`; `options`: of a request, besides where its texts are cut."""
    return Family(
        name=name,
        architectures=frozenset(),
        claims=claims,
        graph=graph,
        stages_module=f"segue.models.{name}.stages",
        chats=lambda model_dir: False,
        options=options | _CUT,
        tiny_module=f"segue.models.{name}.tiny",
        tiny_names=presets,
    )
