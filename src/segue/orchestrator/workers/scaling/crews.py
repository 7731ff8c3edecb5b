"""Describe the workers of the stages to the policies (`move_policy`, `scale_policy`): their load, where others fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from segue.graph.deployment.deployment import Plan
from segue.graph.deployment.stage_plan import CPU, Scaling
from segue.graph.parts import is_built_in
from segue.messages.addresses import SERVER
from segue.messages.wire import Stats
from segue.orchestrator.workers.replicas import Replica, Replicas
from segue.orchestrator.workers.scaling.crew import Crew
from segue.orchestrator.workers.scaling.scale_policy import is_calm

Group = tuple[str, ...]


class Nodes(Protocol):
    """The hosts on which workers can be started."""

    def has_node(self, node: str) -> bool:
        """Whether it is there."""

    def may_have(self, node: str) -> bool:
        """Whether it is there, or comes if a worker is to be started on it."""


@dataclass(slots=True)
class _Past:
    """What is remembered of stages that share workers."""

    calm_since: float | None = None
    """Time since which one worker fewer would have been enough."""
    changed: float = -math.inf
    """Time of the end of the last change."""
    failures: int = 0
    """Workers in a row that could not be added."""


class Crews:
    """The workers of a plan's stages."""

    def __init__(self, plan: Plan, replicas: Replicas, stats: Mapping[str, Stats], nodes: Nodes) -> None:
        """`stats`: the latest of each worker, by its name."""
        self._plan = plan
        self._replicas = replicas
        self._stats = stats
        self._nodes = nodes
        self._pasts = {group: _Past() for group in plan.groups if not any(map(is_built_in, group))}
        self.ranged = any(stage.scaling is not None for stage in plan.stages.values())
        """Whether a stage has a range of replicas."""

    def changed(self, group: Group, now: float, *, failed: bool) -> None:
        """Record the end of a change of a group's workers."""
        self._pasts[group] = _Past(changed=now, failures=self._pasts[group].failures + 1 if failed else 0)

    def describe(self, now: float) -> list[Crew]:
        """Return the workers of each group. `now`: a clock, of which only differences matter."""
        return [self._crew(group, now) for group in self._pasts]

    def _crew(self, group: Group, now: float) -> Crew:
        replicas = self._replicas.of_group(group)
        ready = [replica for replica in replicas if replica.state == "ready"]
        age = max(self._ages(ready), default=0.0)
        requests = sum(len(replica.working) for replica in ready)
        past, scaling = self._pasts[group], self._scaling(group)
        max_batch = min(self._plan.stages[name].max_batch for name in group)
        if scaling is None or not is_calm(len(ready), age, requests, max_batch, scaling):
            past.calm_since = None
        elif past.calm_since is None:
            past.calm_since = now
        return Crew(
            group[-1],
            len(ready),
            age,
            requests,
            self._room_for(group),
            workers=sum(replica.state != "failed" for replica in replicas),
            room=self.free_place(group) is not None,
            scaling=scaling,
            calm=0.0 if past.calm_since is None else now - past.calm_since,
            since_change=now - past.changed,
            failures=past.failures,
        )

    def _ages(self, ready: Sequence[Replica]) -> Iterator[float]:
        for replica in ready:
            for stage in self._stats[replica.worker].stages if replica.worker in self._stats else ():
                age = stage.values.get("queue_age_seconds", 0.0)
                if isinstance(age, float):
                    yield age

    def _scaling(self, group: Group) -> Scaling | None:
        return self._plan.stages[group[0]].scaling

    def _room_for(self, group: Group) -> frozenset[str]:
        """Return the stages on whose devices a worker of a group would fit, if workers move."""
        others = [other for other in self._pasts if other != group] if self._plan.moves is not None else []
        fits = (other for other in others if self.overfull(other, self._replicas.free_index(other), group) is None)
        return frozenset(other[-1] for other in fits)

    def free_place(self, group: Group) -> int | None:
        """Return the number of a worker that can be added, on devices with room of a host that is there, or else of one
        that may come; None: there is none."""
        scaling, stage = self._scaling(group), self._plan.stages[group[0]]
        if scaling is None:
            return None
        taken = {replica.index for replica in self._replicas.of_group(group)}
        fitting = [
            index
            for index in range(scaling.most)
            if index not in taken and self._nodes.may_have(stage.node_of(index)) and self.overfull(group, index) is None
        ]
        return min(fitting, key=lambda index: not self._nodes.has_node(stage.node_of(index)), default=None)

    def overfull(self, target: Group, index: int, source: Group | None = None) -> str | None:
        """Return a device on which memory shares would add up to more than 1 with worker number `index` of `target`,
        and without one of `source`; None: it fits."""
        used: Counter[tuple[str, str]] = Counter()
        for group in self._plan.groups:
            places = [replica.index for replica in self._replicas.of_group(group)]
            if group == source:
                places.remove(max(places))
            if group == target:
                places.append(index)
            for stage in (self._plan.stages[name] for name in group):
                for place in places:
                    for rank in range(1 if CPU in stage.devices else stage.ranks):
                        where = stage.node_of(place), stage.device_of(place, rank)
                        used[where] += stage.memory_share  # type: ignore[assignment]
        full = next((where for where, share in used.items() if share > 1 + 1e-9), None)
        return None if full is None else full[1] if full[0] == SERVER else f"{full[1]} of {full[0]}"
