"""Move a worker from one stage to another while the system runs.

    draining ── no further requests; those that it has may end, within `limits.drain_seconds`
    ending   ── the process ends; what it still had goes on at its siblings, as after a death
    loading  ── another process starts for the other stage

One move runs at a time. The last ready worker of a stage stays. A worker that cannot load the other stage goes back.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from segue.graph.deployment.deployment import Plan
from segue.graph.deployment.stage_plan import CPU
from segue.graph.parts import is_built_in
from segue.messages.errors import InvalidRequest, Overloaded, SegueError, ShuttingDown, StageLost, nearest, wrong
from segue.messages.wire import Shutdown, Stats, ToWorker
from segue.orchestrator.service import MovedWorker
from segue.orchestrator.workers.move_policy import Crew, decide
from segue.orchestrator.workers.replicas import Replica, Replicas

log = logging.getLogger(__name__)

_LAST_WORDS = 10.0
"""Seconds for a worker without requests to end by itself."""


class Processes(Protocol):
    """What a move does with processes."""

    def send(self, address: str, message: ToWorker) -> None: ...

    def spawn(self, replica: Replica) -> None: ...

    def kill(self, replica: Replica) -> None: ...


@dataclass(slots=True)
class _Move:
    replica: Replica
    """The worker that leaves; then the one that loads."""
    source: tuple[str, ...]
    target: tuple[str, ...]
    done: asyncio.Future[MovedWorker]
    began: float
    timer: asyncio.TimerHandle
    phase: str = "draining"


class Moves:
    """The move that runs, if any. The supervisor calls the methods when something happened to a worker."""

    def __init__(self, plan: Plan, replicas: Replicas, stats: Mapping[str, Stats], processes: Processes) -> None:
        self._plan = plan
        self._replicas = replicas
        self._stats = stats
        self._processes = processes
        self._move: _Move | None = None
        self._ended = -math.inf
        self._stopped = False
        self.count = 0
        """Moves that succeeded."""

    @property
    def running(self) -> bool:
        return self._move is not None

    def begin(self, source: str, target: str) -> asyncio.Future[MovedWorker]:
        """Begin to move a worker of one stage to another; the future is done when it serves there.

        Raises `InvalidRequest` if no worker can move, `Overloaded` while another one moves, `ShuttingDown` after
        `stop`.
        """
        if self._stopped:
            raise ShuttingDown("the server is shutting down")
        groups = [self._group(stage, field) for stage, field in ((source, "from_stage"), (target, "to_stage"))]
        if groups[0] == groups[1]:
            raise wrong("to_stage", target, f"a stage that shares no worker with {source!r}")
        if self._move is not None:
            raise Overloaded("a worker is moving already; try again when that is done")
        ready = [replica for replica in self._replicas.of_group(groups[0]) if replica.state == "ready"]
        if len(ready) < 2:
            count = f"{len(ready)} ready worker{'s' if len(ready) != 1 else ''}"
            raise InvalidRequest(
                f"from_stage is {source!r}, which has {count}; it must have at least 2: the last one stays",
                field="from_stage",
            )
        if (device := self._overfull(groups[0], groups[1])) is not None:
            raise InvalidRequest(
                f"to_stage is {target!r}: with another worker, memory shares would add up to more than 1 on {device}; "
                "lower memory_share in the deployment",
                field="to_stage",
            )
        loop = asyncio.get_running_loop()
        replica = min(ready, key=lambda replica: len(replica.requests))
        replica.state, replica.leaving = "draining", True
        timer = loop.call_later(self._plan.limits.drain_seconds, self._end_worker)
        self._move = _Move(replica, groups[0], groups[1], loop.create_future(), time.monotonic(), timer)
        log.info("worker %s moves from %s to %s", replica.worker, source, target)
        self.request_left()
        return self._move.done

    def _group(self, stage: str, field: str) -> tuple[str, ...]:
        movable = [name for name in self._plan.stages if not is_built_in(name)]
        if stage not in movable:
            raise InvalidRequest(
                f"{field} is {stage!r}, which is no stage whose workers can move{nearest(stage, movable)}", field=field
            )
        return self._replicas.group_of(stage)

    # ── what happens meanwhile ─────────────────────────────────────────────────────────────────────────────────────

    def request_left(self) -> None:
        """End the worker if its last request has ended."""
        if self._move is not None and self._move.phase == "draining" and not self._move.replica.requests:
            self._end_worker()

    def _end_worker(self) -> None:
        move = self._move
        assert move is not None, "its timer ends with it"
        move.timer.cancel()
        move.phase = "ending"
        if move.replica.requests:  # the drain time is over
            self._processes.kill(move.replica)
            return
        self._processes.send(move.replica.address, Shutdown())
        move.timer = asyncio.get_running_loop().call_later(_LAST_WORDS, self._processes.kill, move.replica)

    def exited(self, replica: Replica) -> bool:
        """Start the other process if this was the leaving one; False if it was not."""
        move = self._move
        if move is None or move.replica is not replica or move.phase == "loading":
            return False
        move.timer.cancel()
        self._replicas.remove(replica)
        move.replica, move.phase = self._replicas.add(move.target), "loading"
        self._processes.spawn(move.replica)
        return True

    def ready(self, replica: Replica) -> None:
        """End the move if this is its worker."""
        move = self._move
        if move is not None and move.replica is replica and move.phase == "loading":
            self.count += 1
            seconds = time.monotonic() - move.began
            log.info("worker %s is ready after a move of %.1f s", replica.worker, seconds)
            self._finish(MovedWorker(move.source[-1], move.target[-1], replica.worker, seconds))

    def failed(self, replica: Replica) -> None:
        """Bring a worker back that was given up while it loaded the other stage."""
        move = self._move
        if move is None or move.replica is not replica:
            return
        self._replicas.remove(replica)
        self._processes.spawn(self._replicas.add(move.source))
        stage = move.target[-1]
        self._finish(StageLost(f"the worker could not load stage {stage!r}, and went back", stage=stage))

    def abort(self, error: SegueError) -> None:
        """End the move: every process is gone, or keeps what it has."""
        if self._move is not None:
            self._finish(error)

    def stop(self) -> None:
        """End the move, and begin no other."""
        self._stopped = True
        self.abort(ShuttingDown("the server is shutting down"))

    def _finish(self, result: MovedWorker | SegueError) -> None:
        move, self._move = self._move, None
        assert move is not None
        move.timer.cancel()
        self._ended = time.monotonic()
        if move.done.done():
            return  # its caller has gone
        if isinstance(result, SegueError):
            move.done.set_exception(result)
        else:
            move.done.set_result(result)

    # ── policy ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def consider(self, now: float) -> None:
        """Begin the move that the deployment's policy asks for, if any."""
        policy = self._plan.moves
        if policy is None or self._move is not None or self._stopped:
            return
        decision = decide(policy, self._crews(), now - self._ended)
        if decision is not None:
            log.info("stage %s has an old queue: a worker of %s moves there", decision.target, decision.source)
            self.begin(decision.source, decision.target).add_done_callback(_report)

    def _crews(self) -> list[Crew]:
        groups = [group for group in self._plan.groups if not any(map(is_built_in, group))]
        return [self._crew(group, groups) for group in groups]

    def _crew(self, group: tuple[str, ...], groups: list[tuple[str, ...]]) -> Crew:
        ready = [replica for replica in self._replicas.of_group(group) if replica.state == "ready"]
        ages = [0.0]
        for replica in ready:
            for stage in self._stats[replica.worker].stages if replica.worker in self._stats else ():
                age = stage.values.get("queue_age_seconds", 0.0)
                ages += [age] if isinstance(age, float) else []
        others = [other for other in groups if other != group]
        return Crew(
            group[-1],
            len(ready),
            max(ages),
            sum(len(replica.working) for replica in ready),
            frozenset(other[-1] for other in others if self._overfull(group, other) is None),
        )

    def _overfull(self, source: tuple[str, ...], target: tuple[str, ...]) -> str | None:
        """Return a device on which memory shares would add up to more than 1 after a move."""
        used: Counter[str] = Counter()
        for group in self._plan.groups:
            places = [replica.index for replica in self._replicas.of_group(group)]
            if group == source:
                places.remove(max(places))
            if group == target:
                places.append(self._replicas.free_index(target))
            for stage in (self._plan.stages[name] for name in group):
                for index in places:
                    for rank in range(1 if CPU in stage.devices else stage.ranks):
                        used[stage.device_of(index, rank)] += stage.memory_share  # type: ignore[assignment]
        return next((device for device, share in used.items() if share > 1 + 1e-9), None)


def _report(done: asyncio.Future[MovedWorker]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("a worker could not be moved: %s", error)
