"""The module kind: one-shot networks (encoders, decoders, vocoders) and the input stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from segue.graph.deployment.section import Section
from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.kinds.kind import EngineKind, extended

_BATCH_WAIT = 0.05


@dataclass(frozen=True, slots=True)
class ModulePlan(StagePlan):
    """A stage of the module engine."""

    min_batch: int = 1
    """Items that a call waits for, at most `batch_wait` seconds."""
    batch_wait: float = _BATCH_WAIT
    max_model_len: int | None = None
    """Most tokens of a text that it encodes whole; only `defaults` sets it."""
    compile: bool = False
    """Only `defaults` sets it."""


def _resolve(stage: StagePlan, section: Section, choices: Mapping[str, str]) -> ModulePlan:
    return extended(
        ModulePlan,
        stage,
        min_batch=section.integer("min_batch", 1, most=stage.max_batch),
        batch_wait=section.number("batch_wait", _BATCH_WAIT),
        max_model_len=section.integer("max_model_len", None),
        compile=section.flag("compile", False),
    )


MODULE = EngineKind(
    name="module",
    plan=ModulePlan,
    resolve=_resolve,
    worker="segue.worker.kinds.module",
    keys=("min_batch", "batch_wait"),
    weight=1,
    weight_of_main=1,
    replayable=True,
    shares_weights=True,
)
