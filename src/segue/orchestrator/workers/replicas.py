"""The workers that should exist and their states: `replicas` workers per group of fused stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from segue.graph.deployment.stage_plan import StagePlan
from segue.messages.addresses import SERVER
from segue.messages.wire import StageFacts
from segue.orchestrator.service import Health, ReplicaHealth, ReplicaState, StageHealth
from segue.orchestrator.workers.affinity import PrefixMemory


@dataclass(slots=True)
class Replica:
    """One worker slot, filled by successive incarnations."""

    group: tuple[str, ...]
    index: int
    node: str = SERVER
    """The host that it runs on."""
    incarnation: int = 0
    state: ReplicaState = "starting"
    pid: int | None = None
    loading: float = 0.0
    what: str = "waiting"
    address: str = ""
    requests: set[str] = field(default_factory=set)
    """Requests that may still need something of it, such as payloads that it keeps."""
    working: set[str] = field(default_factory=set)
    """Of these, the requests with a stage here that is not done."""
    reading: dict[str, bool] = field(default_factory=dict)
    """For an input worker: the requests that it is still processing, including cancelled ones; true: with media."""
    pinged: float | None = None
    """time.monotonic() of an unanswered `Ping`, plus the time in which no answer could be received."""
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    """The prompts that this incarnation was sent."""
    chosen: int = 0
    """Number of the choice that gave it a request last, if its stage is routed by prefix; else 0."""
    leaving: bool = False
    """It finishes what it has, before its process ends and another one starts for another stage."""
    failures: int = 0
    """Number of successive deaths before it was ready."""
    buried: bool = False
    """This incarnation is dead, and the next one is not spawned yet; what it still says does not count."""
    cut_off: bool = False
    """Messages between it and the server were lost: it is being killed, and what it still says does not count."""
    slot: str = field(init=False)
    """The name of the slot."""

    def __post_init__(self) -> None:
        self.slot = f"{self.group[-1]}.{self.index}"

    @property
    def worker(self) -> str:
        """The worker's name, unique per incarnation."""
        return f"{self.slot}-{self.incarnation}"

    @property
    def alive(self) -> bool:
        """Whether its process serves requests: the ready ones, and those that only finish what they have."""
        return (self.state == "ready" or self.leaving) and not self.cut_off

    def clear(self) -> None:
        """Forget all that this incarnation had: it is dead."""
        self.requests.clear()
        self.working.clear()
        self.reading.clear()
        self.leaving = self.cut_off = False
        self.prefixes = PrefixMemory()
        self.chosen = 0


class Replicas:
    """All replicas of a plan."""

    def __init__(self, groups: Iterable[tuple[str, ...]], plans: Mapping[str, StagePlan]) -> None:
        self._plans = plans
        self.all = [
            Replica(group, index, plans[group[0]].node_of(index))
            for group in groups
            for index in range(plans[group[0]].replicas)
        ]
        self._by_slot = {replica.slot: replica for replica in self.all}
        self._by_stage: dict[str, list[Replica]] = {}
        for replica in self.all:
            for stage in replica.group:
                self._by_stage.setdefault(stage, []).append(replica)
        self._incarnations: dict[tuple[tuple[str, ...], int], int] = {}
        """The last incarnation of each worker that was removed: names are never used again."""
        self.facts: dict[str, StageFacts] = {}

    def group_of(self, stage: str) -> tuple[str, ...]:
        return self._by_stage[stage][0].group

    def by_worker(self, worker: str) -> Replica | None:
        """Return the replica whose current incarnation has this name and is not known to be dead."""
        replica = self.in_slot(worker.rpartition("-")[0])
        return replica if replica is not None and replica.worker == worker and not replica.buried else None

    def in_slot(self, slot: str) -> Replica | None:
        """Return the replica of a slot, whatever its incarnation."""
        return self._by_slot.get(slot)

    def by_address(self, address: str) -> Replica | None:
        """Return the replica whose current incarnation has this inbox."""
        return next((replica for replica in self.all if replica.address == address), None)

    def alive(self) -> set[str]:
        """Return the names of the incarnations that serve requests."""
        return {replica.worker for replica in self.all if replica.alive}

    def of_group(self, group: tuple[str, ...]) -> list[Replica]:
        """Return all replicas of a group, whatever their state."""
        return self._by_stage[group[0]]

    def free_index(self, group: tuple[str, ...]) -> int:
        """Return the index of the next worker of a group."""
        taken = {replica.index for replica in self.of_group(group)}
        return next(index for index in range(len(taken) + 1) if index not in taken)

    def add(self, group: tuple[str, ...], index: int) -> Replica:
        """Add a worker to a group, to be started. `index`: one that none of the group has."""
        node = self._plans[group[0]].node_of(index)
        replica = Replica(group, index, node, self._incarnations.get((group, index), 0))
        self.all.append(replica)
        self._by_slot[replica.slot] = replica
        for stage in group:
            self._by_stage[stage].append(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """Remove a worker that has ended."""
        self._incarnations[replica.group, replica.index] = replica.incarnation
        self.all.remove(replica)
        del self._by_slot[replica.slot]
        for stage in replica.group:
            self._by_stage[stage].remove(replica)

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
