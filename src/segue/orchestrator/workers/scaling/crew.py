"""What the policies know of a stage's workers."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
