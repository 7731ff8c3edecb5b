"""The workers that should exist, and how they are: one replica per group of fused stages and copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from segue.messages.wire import StageFacts
from segue.orchestrator.service import Health, ReplicaHealth, ReplicaState, StageHealth


@dataclass(slots=True)
class Replica:
    """One worker's place; incarnations come and go in it."""

    group: tuple[str, ...]
    index: int
    incarnation: int = 0
    state: ReplicaState = "starting"
    pid: int | None = None
    loading: float = 0.0
    what: str = "waiting"
    address: str = ""
    requests: set[str] = field(default_factory=set)
    pinged: float | None = None
    """time.monotonic() of a `Ping` that is not answered yet; later by the time in which no answer could be heard."""
    failures: int = 0
    """Deaths in a row before it was ready."""

    @property
    def worker(self) -> str:
        """Unique per incarnation."""
        return f"{self.group[-1]}.{self.index}-{self.incarnation}"


class Replicas:
    """All replicas of a plan."""

    def __init__(self, groups: Iterable[tuple[str, ...]], counts: dict[str, int]) -> None:
        self.all = [Replica(group, index) for group in groups for index in range(counts[group[0]])]
        self._by_stage: dict[str, list[Replica]] = {}
        for replica in self.all:
            for stage in replica.group:
                self._by_stage.setdefault(stage, []).append(replica)
        self.facts: dict[str, StageFacts] = {}

    def group_of(self, stage: str) -> tuple[str, ...]:
        return self._by_stage[stage][0].group

    def by_worker(self, worker: str) -> Replica | None:
        """The replica whose current incarnation has this name."""
        return next((replica for replica in self.all if replica.worker == worker), None)

    def alive(self) -> set[str]:
        """Names of the incarnations that are ready."""
        return {replica.worker for replica in self.all if replica.state == "ready"}

    def least_loaded(self, stage: str) -> Replica | None:
        """The ready replica of a stage with the fewest requests."""
        ready = [replica for replica in self._by_stage[stage] if replica.state == "ready"]
        return min(ready, key=lambda replica: len(replica.requests), default=None)

    def hopeless(self, stage: str) -> bool:
        """True when every replica of a stage has given up."""
        return all(replica.state == "failed" for replica in self._by_stage[stage])

    def ready(self) -> bool:
        return all(any(r.state == "ready" for r in replicas) for replicas in self._by_stage.values())

    def health(self) -> Health:
        stages = {}
        for stage, replicas in self._by_stage.items():
            states: list[ReplicaState] = [replica.state for replica in replicas]
            best: ReplicaState = "ready" if "ready" in states else states[0]
            stages[stage] = StageHealth(
                best,
                [ReplicaHealth(r.pid, r.state, max(0, r.incarnation - 1), r.loading) for r in replicas],
            )
        return Health(self.ready(), stages)
