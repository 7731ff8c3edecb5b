"""Decide when a worker moves from one stage to another: a pure function of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from segue.graph.deployment.deployment import MovePolicy
from segue.orchestrator.workers.scaling.crew import Crew


@dataclass(frozen=True, slots=True)
class WorkerMove:
    """Move a worker."""

    source: str
    target: str


def decide(policy: MovePolicy, crews: Sequence[Crew], since_last: float) -> WorkerMove | None:
    """Return the move that the policy asks for, if any.

    The stage with the oldest queue gets a worker of the stage with the fewest requests per worker, among those that
    have no queue, at least two workers, and room; the ranges of both are kept. `since_last`: seconds since the last
    move ended.
    """
    if since_last < policy.cooldown:
        return None
    for target in sorted(crews, key=lambda crew: -crew.queue_age):
        if target.queue_age < policy.queue_age:
            return None
        if not target.may_gain:
            continue
        sources = [crew for crew in crews if crew.may_lose and crew.queue_age == 0 and target.stage in crew.room_for]
        if sources:
            source = min(sources, key=lambda crew: crew.requests / crew.ready)
            return WorkerMove(source.stage, target.stage)
    return None
