"""Decide when a stage gets a further worker or gives one back: pure functions of a snapshot.

A stage whose deployment gives a range of replicas grows when its oldest queued request has waited for the objective,
and shrinks when one worker fewer would have been enough for a while. The two thresholds are far apart: after a stage
has shrunk, its workers are at most half full. So a constant load leaves the number as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from segue.graph.deployment.stage_plan import Scaling
from segue.orchestrator.workers.scaling.crew import Crew

_MOST_DOUBLINGS = 6
"""After failures in a row the pause before the next attempt doubles, up to 64 times `cooldown`."""


@dataclass(frozen=True, slots=True)
class Grow:
    """Start another worker of a stage."""

    stage: str


@dataclass(frozen=True, slots=True)
class Shrink:
    """Let a worker of a stage finish what it has, and end it."""

    stage: str


def is_calm(ready: int, queue_age: float, requests: int, max_batch: int, scaling: Scaling) -> bool:
    """Whether one ready worker fewer would be enough: no request waits, and the others would be at most half full."""
    return ready > scaling.least and queue_age == 0 and 2 * requests <= (ready - 1) * max_batch


def next_change(crews: Sequence[Crew]) -> Grow | Shrink | None:
    """Return the change to make now, if any.

    A stage below its least number comes first, then the one whose queue is the oldest by its own objective; one without
    room is passed over. Only if none grows does one shrink.
    """
    ranged = [(crew, crew.scaling) for crew in crews if crew.scaling is not None and _has_rested(crew, crew.scaling)]
    growing = [
        (crew.workers >= scaling.least, -crew.queue_age / scaling.queue_age, crew.stage)
        for crew, scaling in ranged
        if crew.room
        and (crew.workers < scaling.least or (crew.workers < scaling.most and crew.queue_age >= scaling.queue_age))
    ]
    if growing:
        return Grow(min(growing)[-1])
    calm = [(-crew.calm, crew.stage) for crew, scaling in ranged if crew.calm >= scaling.idle]
    return Shrink(min(calm)[-1]) if calm else None


def _has_rested(crew: Crew, scaling: Scaling) -> bool:
    return crew.since_change >= scaling.cooldown * 2 ** min(crew.failures, _MOST_DOUBLINGS)
