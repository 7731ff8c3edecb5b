from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from segue.graph.deployment.section import Section
from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.kinds.kind import EngineKind, extended


@dataclass(frozen=True, slots=True)
class LeakyPlan(StagePlan):
    decay: float = 1.0


def resolve(stage: StagePlan, section: Section, choices: Mapping[str, str]) -> LeakyPlan:
    return extended(LeakyPlan, stage, decay=section.number("decay", 1.0, most=1.0))


LEAKY = EngineKind(
    name="leaky", plan=LeakyPlan, resolve=resolve, worker="segue_leaky.worker", keys=("decay",), max_batch=2
)
