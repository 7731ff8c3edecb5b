"""Decide when a worker moves from one stage to another: a pure function of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from segue.graph.deployment.deployment import MovePolicy


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of one stage, or of stages that share workers."""

    stage: str
    ready: int
    """Workers that take requests."""
    queue_age: float
    """Seconds that the oldest request in a queue has waited; 0: no request waits."""
    requests: int
    """Requests in its workers."""
    room_for: frozenset[str] = frozenset()
    """Stages on whose devices one of its workers would fit."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Move a worker."""

    source: str
    target: str


def decide(policy: MovePolicy, crews: Sequence[Crew], since_last: float) -> Decision | None:
    """Return the move that the policy asks for, if any.

    The stage with the oldest queue gets a worker of the stage with the fewest requests per worker, among those that
    have no queue, at least two workers, and room. `since_last`: seconds since the last move ended.
    """
    if since_last < policy.cooldown:
        return None
    for target in sorted(crews, key=lambda crew: -crew.queue_age):
        if target.queue_age < policy.queue_age:
            return None
        sources = [crew for crew in crews if crew.ready > 1 and crew.queue_age == 0 and target.stage in crew.room_for]
        if sources:
            source = min(sources, key=lambda crew: crew.requests / crew.ready)
            return Decision(source.stage, target.stage)
    return None
