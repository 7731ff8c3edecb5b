"""The module kind: one-shot networks (encoders, decoders, vocoders) and the input stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from segue.graph.deployment.section import Section
from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.kinds.kind import EngineKind, extended


@dataclass(frozen=True, slots=True)
class ModulePlan(StagePlan):
    """A stage of the module engine. It has no keys of its own; `defaults` may set these."""

    max_model_len: int | None = None
    """Most tokens of a text that it encodes whole."""
    compile: bool = False


def _resolve(stage: StagePlan, section: Section, choices: Mapping[str, str]) -> ModulePlan:
    return extended(
        ModulePlan,
        stage,
        max_model_len=section.integer("max_model_len", None),
        compile=section.flag("compile", False),
    )


MODULE = EngineKind(
    name="module",
    plan=ModulePlan,
    resolve=_resolve,
    worker="segue.worker.kinds.module",
    weight=1,
    weight_of_main=1,
    replayable=True,
)
