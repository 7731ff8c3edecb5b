"""Pipelines that no family names, as the registry knows them. No torch here."""

from __future__ import annotations

from segue.models.family import Family
from segue.models.generic_pipeline.graph import claims, graph

FAMILY = Family(
    name="generic_pipeline",
    architectures=frozenset(),
    graph=graph,
    stages_module="segue.models.generic_pipeline.stages",
    claims=claims,
    chats=lambda model_dir: False,
    open_options=True,
)
