"""Change how many workers the stages have while the system runs: move one from a stage to another, add one, remove one.

    draining ── no further requests; those that it has may end, within `limits.drain_seconds`
    ending   ── the process ends; what it still had goes on at its siblings, as after a death
    loading  ── another process starts

A move goes through all three; a worker that is added only loads, and one that is removed drains and ends. One change
runs at a time. The last ready worker of a stage stays. A worker that cannot load the other stage goes back; one that
was to be added is given up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from segue.graph.deployment.deployment import Plan
from segue.graph.parts import is_built_in
from segue.messages.errors import InvalidRequest, Overloaded, SegueError, ShuttingDown, StageLost, nearest, wrong
from segue.messages.wire import Shutdown, Stats, ToWorker
from segue.orchestrator.service import MovedWorker
from segue.orchestrator.workers.replicas import Replica, Replicas
from segue.orchestrator.workers.scaling.crews import Crews, Group, Nodes
from segue.orchestrator.workers.scaling.move_policy import decide
from segue.orchestrator.workers.scaling.scale_policy import Grow, Shrink, next_change

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks at the load, if a stage has a range of replicas; idle workers report nothing."""
NODE_SECONDS = 180.0
"""For a host to come that a worker is to be added on."""

_LAST_WORDS = 10.0
"""Seconds for a worker without requests to end by itself."""


class Processes(Nodes, Protocol):
    """What a change does with processes."""

    def update_nodes(self) -> None: ...

    def send(self, address: str, message: ToWorker) -> None: ...

    def spawn(self, replica: Replica) -> None: ...

    def kill(self, replica: Replica) -> None: ...


@dataclass(slots=True)
class _Change:
    replica: Replica
    """The worker that leaves; then, in a move, the one that loads."""
    source: Group | None
    """The stages that lose a worker; None: one is added."""
    target: Group | None
    """The stages that get one; None: one is removed."""
    began: float
    phase: str
    done: asyncio.Future[MovedWorker] | None = None
    """Of a move."""
    timer: asyncio.TimerHandle | None = None

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Moves:
    """The change that runs, if any. The supervisor calls the methods when something happened to a worker."""

    def __init__(
        self,
        plan: Plan,
        replicas: Replicas,
        stats: Mapping[str, Stats],
        processes: Processes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._clock = clock
        self._replicas = replicas
        self._crews = Crews(plan, replicas, stats, processes)
        self._processes = processes
        self._change: _Change | None = None
        self._moved = -math.inf
        """Time of the end of the last move."""
        self._look: asyncio.TimerHandle | None = None
        self._stopped = False
        self.count = 0
        """Moves that succeeded."""
        self.added = 0
        """Workers that the load has added."""
        self.removed = 0
        """Workers that the load has removed."""

    @property
    def running(self) -> bool:
        """Whether a worker moves."""
        return self._change is not None and self._change.done is not None

    def start(self) -> None:
        """Look at the load every `LOOK_SECONDS`, if a stage has a range of replicas."""
        if self._crews.ranged:
            self.consider(self._clock())
            self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self.start)

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
        if self._change is not None:
            what = "a worker is moving already" if self.running else "a worker is added or removed, by the load, now"
            raise Overloaded(f"{what}; try again when that is done")
        ready = [replica for replica in self._replicas.of_group(groups[0]) if replica.state == "ready"]
        if len(ready) < 2:
            count = f"{len(ready)} ready worker{'s' if len(ready) != 1 else ''}"
            raise InvalidRequest(
                f"from_stage is {source!r}, which has {count}; it must have at least 2: the last one stays",
                field="from_stage",
            )
        if (device := self._crews.overfull(groups[1], self._replicas.free_index(groups[1]), groups[0])) is not None:
            raise InvalidRequest(
                f"to_stage is {target!r}: with another worker, memory shares would add up to more than 1 on {device}; "
                "lower memory_share in the deployment",
                field="to_stage",
            )
        done: asyncio.Future[MovedWorker] = asyncio.get_running_loop().create_future()
        replica = min(ready, key=lambda replica: len(replica.requests))
        log.info("worker %s moves from %s to %s", replica.worker, source, target)
        self._drain(_Change(replica, groups[0], groups[1], self._clock(), "draining", done))
        return done

    def _drain(self, change: _Change) -> None:
        """Begin a change: its worker gets no further requests."""
        change.replica.state, change.replica.leaving = "draining", True
        drain = self._plan.limits.drain_seconds
        change.timer = asyncio.get_running_loop().call_later(drain, self._end_worker)
        self._change = change
        self.request_left()

    def _grow(self, group: Group) -> None:
        """Add a worker."""
        index = self._crews.free_place(group)
        assert index is not None, "the policy was told of room"
        replica = self._replicas.add(group, index)
        log.info("stage %s gets another worker, on %s", group[-1], replica.node)
        change = self._change = _Change(replica, None, group, self._clock(), "loading")
        if not self._processes.has_node(replica.node):
            change.timer = asyncio.get_running_loop().call_later(NODE_SECONDS, self._give_up_node)
        self._processes.update_nodes()
        self._processes.spawn(replica)

    def _give_up_node(self) -> None:
        """Give up a worker whose node has not come."""
        change = self._change
        assert change is not None, "its timer ends with it"
        if not self._processes.has_node(change.replica.node):
            self.failed(change.replica)

    def _shrink(self, group: Group) -> None:
        """Remove the ready worker with the highest number: those of the start stay."""
        ready = [replica for replica in self._replicas.of_group(group) if replica.state == "ready"]
        replica = max(ready, key=lambda replica: replica.index)
        log.info("stage %s needs worker %s no more", group[-1], replica.worker)
        self._drain(_Change(replica, group, None, self._clock(), "draining"))

    def _group(self, stage: str, field: str) -> Group:
        movable = [name for name in self._plan.stages if not is_built_in(name)]
        if stage not in movable:
            raise InvalidRequest(
                f"{field} is {stage!r}, which is no stage whose workers can move{nearest(stage, movable)}", field=field
            )
        return self._replicas.group_of(stage)

    # ── what happens meanwhile ─────────────────────────────────────────────────────────────────────────────────────

    def request_left(self) -> None:
        """End the worker if its last request has ended."""
        if self._change is not None and self._change.phase == "draining" and not self._change.replica.requests:
            self._end_worker()

    def _end_worker(self) -> None:
        change = self._change
        assert change is not None, "its timer ends with it"
        change.cancel_timer()
        change.phase = "ending"
        if change.replica.requests:  # the drain time is over
            self._processes.kill(change.replica)
            return
        self._processes.send(change.replica.address, Shutdown())
        change.timer = asyncio.get_running_loop().call_later(_LAST_WORDS, self._processes.kill, change.replica)

    def exited(self, replica: Replica) -> bool:
        """Go on if this was the leaving worker; False if it was not."""
        change = self._change
        if change is None or change.replica is not replica or change.phase == "loading":
            return False
        change.cancel_timer()
        self._replicas.remove(replica)
        if change.target is None:
            self._is_removed(change)
        else:
            change.replica, change.phase = self._add(change.target), "loading"
            self._processes.spawn(change.replica)
        return True

    def _add(self, group: Group) -> Replica:
        """Add the worker that a move brings, to be started."""
        replica = self._replicas.add(group, self._replicas.free_index(group))
        self._processes.update_nodes()
        return replica

    def _is_removed(self, change: _Change) -> None:
        self.removed += 1
        log.info("worker %s has ended", change.replica.worker)
        self._finish(None)

    def ready(self, replica: Replica) -> None:
        """End the change if this is its worker."""
        change = self._change
        if change is None or change.replica is not replica or change.phase != "loading":
            return
        assert change.target is not None, "one loads for them"
        seconds = self._clock() - change.began
        if change.source is None:
            self.added += 1
            log.info("worker %s is ready after %.1f s, and was added", replica.worker, seconds)
            self._finish(None)
        else:
            self.count += 1
            log.info("worker %s is ready after a move of %.1f s", replica.worker, seconds)
            self._finish(MovedWorker(change.source[-1], change.target[-1], replica.worker, seconds))

    def failed(self, replica: Replica) -> None:
        """Bring a worker back that was given up while it loaded another stage, and give up one that was to be added."""
        change = self._change
        if change is None or change.replica is not replica:
            return
        self._replicas.remove(replica)
        if change.target is None:  # its host is lost: it has ended
            self._is_removed(change)
            return
        stage = change.target[-1]
        if change.source is None:
            log.error("stage %s could not get another worker", stage)
            self._finish(StageLost(f"another worker could not load stage {stage!r}", stage=stage))
            return
        self._processes.spawn(self._add(change.source))
        self._finish(StageLost(f"the worker could not load stage {stage!r}, and went back", stage=stage))

    def abort(self, error: SegueError) -> None:
        """End the change: every process is gone, or keeps what it has."""
        if self._change is not None:
            self._finish(error)

    def stop(self) -> None:
        """End the change, and begin no other."""
        self._stopped = True
        if self._look is not None:
            self._look.cancel()
        self.abort(ShuttingDown("the server is shutting down"))

    def _finish(self, result: MovedWorker | SegueError | None) -> None:
        """`result`: None of a worker that was added or removed."""
        change, self._change = self._change, None
        assert change is not None
        change.cancel_timer()
        now = self._clock()
        self._processes.update_nodes()
        for group in filter(None, (change.source, change.target)):
            self._crews.changed(group, now, failed=isinstance(result, SegueError))
        if change.done is None:
            return
        self._moved = now
        if change.done.done():
            return  # its caller has gone
        if isinstance(result, MovedWorker):
            change.done.set_result(result)
        elif result is not None:
            change.done.set_exception(result)

    # ── policy ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def consider(self, now: float) -> None:
        """Begin the change that the deployment's ranges and policy ask for, if any."""
        policy = self._plan.moves
        if self._change is not None or self._stopped or not (policy or self._crews.ranged):
            return
        crews = self._crews.describe(now)
        match next_change(crews):
            case Grow(stage):
                self._grow(self._replicas.group_of(stage))
                return
            case Shrink(stage):
                self._shrink(self._replicas.group_of(stage))
                return
        decision = None if policy is None else decide(policy, crews, now - self._moved)
        if decision is not None:
            log.info("stage %s has an old queue: a worker of %s moves there", decision.target, decision.source)
            self.begin(decision.source, decision.target).add_done_callback(_report)


def _report(done: asyncio.Future[MovedWorker]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("a worker could not be moved: %s", error)
