"""The workers that should exist and their states: `replicas` workers per group of fused stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from segue.messages.wire import StageFacts
from segue.orchestrator.service import Health, ReplicaHealth, ReplicaState, StageHealth


@dataclass(slots=True)
class Replica:
    """One worker slot, filled by successive incarnations."""

    group: tuple[str, ...]
    index: int
    incarnation: int = 0
    state: ReplicaState = "starting"
    pid: int | None = None
    loading: float = 0.0
    what: str = "waiting"
    address: str = ""
    requests: set[str] = field(default_factory=set)
    reading: dict[str, bool] = field(default_factory=dict)
    """For an input worker: the requests that it is still processing, including cancelled ones; true: with media."""
    pinged: float | None = None
    """time.monotonic() of an unanswered `Ping`, plus the time in which no answer could be received."""
    failures: int = 0
    """Number of successive deaths before it was ready."""

    @property
    def worker(self) -> str:
        """The worker's name, unique per incarnation."""
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
        """Return the replica whose current incarnation has this name."""
        return next((replica for replica in self.all if replica.worker == worker), None)

    def alive(self) -> set[str]:
        """Return the names of the incarnations that are ready."""
        return {replica.worker for replica in self.all if replica.state == "ready"}

    def least_loaded(self, stage: str) -> Replica | None:
        """Return the ready replica of a stage with the fewest requests."""
        ready = [replica for replica in self._by_stage[stage] if replica.state == "ready"]
        return min(ready, key=lambda replica: len(replica.requests), default=None)

    def reader(self, stage: str, *, media: bool) -> Replica | None:
        """Return the ready replica of an input stage for the next request; None: the request waits for one.

        Decoding media may take as long as the deployment's limits allow. So a replica decodes for one request at a
        time, and if there are several, one of them stays free for requests without media.
        """
        ready = [replica for replica in self._by_stage[stage] if replica.state == "ready"]
        busy = [replica for replica in ready if any(replica.reading.values())]
        if media and len(ready) > 1:
            if len(busy) >= len(ready) - 1:
                return None
            ready = [replica for replica in ready if replica not in busy]
        return min(ready, key=lambda replica: (replica in busy, len(replica.reading)), default=None)

    def hopeless(self, stage: str) -> bool:
        """Whether every replica of a stage has been given up."""
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
