"""Decide when a worker moves from one stage to another: a pure function of a snapshot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from segue.graph.deployment.deployment import MovePolicy
from segue.graph.deployment.stage_plan import Scaling


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
    workers: int = 0
    """Those that run or start; the others wait for a host, or were given up."""
    room: bool = False
    """There is a place for another worker."""
    scaling: Scaling | None = None
    """The range of its number of workers."""
    calm: float = 0.0
    """Seconds for which one worker fewer would have been enough; 0: it would not be now."""
    since_change: float = math.inf
    """Seconds since its number of workers was changed, or failed to be."""
    failures: int = 0
    """Workers in a row that could not be added."""

    @property
    def may_lose(self) -> bool:
        """Whether another stage may get one of its workers."""
        return self.ready > (1 if self.scaling is None else self.scaling.least)

    @property
    def may_gain(self) -> bool:
        """Whether it may get a worker of another stage."""
        return self.scaling is None or self.workers < self.scaling.most


@dataclass(frozen=True, slots=True)
class Decision:
    """Move a worker."""

    source: str
    target: str


def decide(policy: MovePolicy, crews: Sequence[Crew], since_last: float) -> Decision | None:
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
            return Decision(source.stage, target.stage)
    return None
