"""Registers pipelines that no other family claims. No torch here."""

from __future__ import annotations

from segue.models.family import Family
from segue.models.images.generic_pipeline.graph import claims, graph

FAMILY = Family(
    name="generic_pipeline",
    architectures=frozenset(),
    graph=graph,
    stages_module="segue.models.images.generic_pipeline.stages",
    reference_module="segue.models.shared.diffusion.reference",
    claims=claims,
    chats=lambda model_dir: False,
    open_options=True,
)
