"""The orchestrator admits requests, assigns each stage of their walk to a worker, tracks them, and recovers them.

Payloads and chunks do not pass through it. It sees the journal (ids), the client's output, and which stages are done;
this state is enough to continue a request when a worker dies (`requests.request_state`). One asyncio task, the
supervisor's, reads the workers' messages; everything else happens in their handlers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from segue.graph.deployment.deployment import Plan
from segue.graph.kinds.registry import kind_of
from segue.graph.parts import OUTPUT, is_input, number_of, only_reads, own_name, stage_of
from segue.messages.deltas import Delta, Finished
from segue.messages.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    SegueError,
    ShuttingDown,
    StageLost,
    error_from,
)
from segue.messages.join import Listen
from segue.messages.process import ModelSource
from segue.messages.request import Appended, Request
from segue.messages.sampling import SamplingParams, merged
from segue.messages.wire import (
    Abandon,
    Drop,
    Emission,
    Failed,
    Forgo,
    InputDone,
    InputLost,
    Progress,
    Reachable,
    StageDone,
    Stats,
    ToOrchestrator,
    Unreachable,
)
from segue.orchestrator.requests.client_queue import ClientQueue
from segue.orchestrator.requests.kept import KeptRequests
from segue.orchestrator.requests.request_state import RequestState, stages_across, stages_to_rerun
from segue.orchestrator.requests.stage_messages import Addressed, appended, begins, closed, resent, returned, throttled
from segue.orchestrator.workers.replicas import Replica
from segue.orchestrator.workers.router import Router, Unplaced, has_media
from segue.orchestrator.workers.supervisor import OnProgress, Supervisor

log = logging.getLogger(__name__)

LINK_PATIENCE = 5.0
"""Seconds that a request waits for nodes to reach each other again, if no others can serve it."""


class Orchestrator:
    """A running graph. `start`, then `stream` requests, then `stop`."""

    def __init__(
        self,
        plan: Plan,
        *,
        sources: Mapping[str, ModelSource],
        preload: list[str],
        load_format: str = "auto",
        on_progress: OnProgress | None = None,
        listen: Listen | None = None,
        supervise: Callable[..., Supervisor] = Supervisor,
    ) -> None:
        """`sources`: the model of a graph of models (a single model's is called by an empty name) → its checkpoint.
        `listen`: where other hosts join. `supervise`: makes the supervisor of its workers."""
        self.plan = plan
        self.graph = plan.graph
        self.supervisor = supervise(
            plan,
            self,
            sources=sources,
            preload=preload,
            load_format=load_format,
            on_progress=on_progress,
            listen=listen,
        )
        self.replicas = self.supervisor.replicas
        self.requests: dict[str, RequestState] = {}
        self.kept = KeptRequests(plan.limits)
        self._router = Router(plan, self.replicas, self.requests, self.supervisor.stats)
        self._unread: dict[str, None] = {}
        """Requests with media that wait for an input worker, in order of arrival."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._left = asyncio.Event()
        """Set whenever a request ends."""
        self._whole = 0
        """Requests to a graph of models that run: each is a request to one of its models at a time, or to several."""
        self._finished = False

    @property
    def stats(self) -> dict[str, Stats]:
        """The latest stats of each worker."""
        return self.supervisor.stats

    @property
    def runtime_dir(self) -> str:
        """The directory of this system's sockets; deleted when the system stops."""
        return self.supervisor.runtime_dir

    # ── life ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Return when every stage has a ready replica; raise the first worker's own error otherwise."""
        self._loop = asyncio.get_running_loop()
        try:
            await self.supervisor.start()
        except BaseException:
            await self.stop(drain=False)
            raise

    async def stop(self, *, drain: bool = True) -> None:
        """Call `finish`, then end every process."""
        await self.finish(drain=drain)
        await self.supervisor.close()

    async def finish(self, *, drain: bool = True) -> None:
        """Admit no more requests, let running ones finish within `limits.drain_seconds`, and end the rest with
        `ShuttingDown`."""
        self.supervisor.stopping = True
        self.supervisor.moves.stop()
        if drain and (self.requests or self._whole):
            try:
                async with asyncio.timeout(self.plan.limits.drain_seconds):
                    await self._idle.wait()
            except TimeoutError:
                log.warning("%d requests were still running when the drain time was over", len(self.requests))
        self._finished = True
        for state in list(self.requests.values()):
            self._end(state, ShuttingDown("the server is shutting down"))
        self.kept.clear()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Count a request to a graph of models as running, even while none of its models has a request."""
        self._whole += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._whole -= 1
            self._note_idle()

    def _note_idle(self) -> None:
        if not self.requests and not self._whole:
            self._idle.set()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def stream(self, asked: Request | RequestState) -> AsyncGenerator[Delta]:
        """Yield the deltas of a request, or of one that has been admitted, `Finished` last; raises `SegueError`.
        Closing the generator cancels the request."""
        state = asked if isinstance(asked, RequestState) else self.admit(asked)
        try:
            while True:
                item, caught_up = await state.queue.get()
                if caught_up:
                    self._throttle(state)
                if isinstance(item, SegueError):
                    raise item
                yield item
                if isinstance(item, Finished):
                    return
        finally:
            self.cancel(state)

    def cancel(self, state: RequestState) -> None:
        """End a request that its client has given up, unless it has ended."""
        if self.requests.get(state.id) is state:
            self._end(state, Cancelled("the client went away"))

    def append(self, state: RequestState, piece: Appended | None) -> bool:
        """Append input to an open request; None: close its input. False: the request has ended."""
        if self.requests.get(state.id) is not state:
            return False
        state.appended.append(piece)
        # a new attempt gets all pieces after its `Begin`
        worker = self.replicas.by_worker(state.stages[state.input].worker)
        if state.input not in state.waiting and worker is not None and worker.alive:
            self._send(appended(state, piece))
        return True

    async def room(self) -> None:
        """Return when there are fewer requests than `limits.max_waiting`, or when no more are admitted."""
        while len(self.requests) >= self.plan.limits.max_waiting and not self.supervisor.stopping:
            self._left.clear()
            await self._left.wait()

    def admit(self, request: Request) -> RequestState:
        """Admit a request. Raises `SegueError` if it cannot be served now."""
        goes_on = bool(request.received)  # with what another model has made for an admitted request
        if self._finished or (self.supervisor.stopping and not goes_on):
            raise ShuttingDown("the server is shutting down")
        limit = self.plan.limits.max_waiting
        if len(self.requests) >= limit and not goes_on:
            raise Overloaded(f"the system already has {limit} requests (limits.max_waiting); try again later")
        if request.request_id in self.requests:
            raise InvalidRequest(f"a request with id {request.request_id!r} is running", field="request_id")
        after = frozenset[str]() if request.previous is None else self.kept.follow(request)
        walk = self.graph.walk(request)
        if request.seed is None:
            request.seed = secrets.randbits(63)
        for name in walk:
            planned = self.plan.stages[name].sampling
            cut = ("truncate_prompt_tokens", "truncation_side")
            if any(getattr(planned, key) is not None for key in cut):  # the input stage truncates without other plans
                asked = request.sampling.get(name, SamplingParams())
                both = merged(request=asked, deployment=planned)
                own = msgspec.structs.replace(asked, **{key: getattr(both, key) for key in cut})
                request.sampling = {**request.sampling, name: own}
        queue = ClientQueue(self.plan.limits.unread_bytes)
        main = self.graph.main_of(request.member)
        state = RequestState(request=request, walk=walk, main=main, queue=queue, after=after)
        self._check_files(state)
        head = state.course.head
        if head is not None and kind_of(self.plan.stages[head].engine).holds:
            if request.open:
                raise InvalidRequest(f"open is set, but this request may return to stage {head!r}", field="open")
            state.held = head
        self._begin_visits(state)
        state.decide()
        if state.main not in walk:
            made = (name for name, stage in reversed(walk.items()) if own_name(name) != OUTPUT)
            state.main = next(name for name in made if walk[name].to_client or walk[name].encoded)
        deadline = request.deadline
        if deadline is None and self.plan.limits.default_deadline is not None:
            deadline = time.time() + self.plan.limits.default_deadline
        if deadline is not None:
            state.timer = self._loop.call_later(
                max(0.0, deadline - time.time()),
                lambda: self._end(state, DeadlineExceeded("the request's deadline passed before it was finished")),
            )
        self.requests[state.id] = state
        self._idle.clear()
        self._launch(state, set(state.stages))
        return state

    @staticmethod
    def _check_files(state: RequestState) -> None:
        """Raise `InvalidRequest` for a file of audio that is made in several visits: each would begin a file."""
        for name in sorted(state.course.again):
            if "audio" in state.walk[name].encoded:
                raise InvalidRequest(
                    f"formats.audio is given, but stage {name!r} may be visited several times, and what it says in all "
                    "visits makes no file: leave it out, to get samples",
                    field="formats.audio",
                )

    def _begin_visits(self, state: RequestState) -> list[str]:
        """Begin the visits that can begin now, without launching them. Returns them."""
        new = state.begin_visits()
        for visit in new:
            if kind_of(self.plan.stages[stage_of(visit)].engine).samples:
                state.journal.setdefault(state.node(visit), {})
        return new

    def _proceed(self, state: RequestState) -> None:
        """Let a request go on after one of its visits has ended."""
        course, open_before = state.course, not state.course.closed
        new = self._begin_visits(state)
        state.waiting |= {state.node(visit) for visit in new if state.node(visit) != state.held or visit == state.held}
        for source, target in state.decide():
            if source not in state.waiting:
                self._send((state.stages[source].address, Forgo(state.id, source, target)))
        if state.held is not None and state.held not in state.waiting and state.held in state.stages:
            for visit in new:
                if stage_of(visit) == state.held and visit != state.held:
                    self._send(returned(state, number_of(visit), state.waiting))
                    for up in map(state.node, course.begun[visit]):
                        if up not in state.waiting:
                            self._send(resent(state, up, state.held))
            if open_before and course.closed and not state.stages[state.held].done:
                self._send(closed(state))
        if state.waiting:
            self._launch(state, set())
        if state.complete():
            self._end(state, None)

    def _launch(self, state: RequestState, names: set[str]) -> None:
        """Start or restart stages as soon as each has a ready worker."""
        state.waiting |= names
        chosen = self._router.place(state)
        if isinstance(chosen, Unplaced) and chosen.cut:
            chosen = self._place_anew(state, chosen)
        if isinstance(chosen, Unplaced):
            stage = chosen.group[-1]
            if chosen.cut:
                self._await_link(state)
            elif self.replicas.hopeless(stage) and not self.supervisor.starting:
                self._end(state, StageLost(f"stage {stage!r} could not be restarted", stage=stage))
            elif only_reads(chosen.group):
                self._unread[state.id] = None  # `_reading_ended` calls this again
            return  # `worker_ready` calls this again
        if state.patience is not None:
            state.patience.cancel()
            state.patience = None
        begin, state.waiting = state.waiting, set()
        for name in begin:
            stage_state, replica = state.stages[name], chosen[self.replicas.group_of(stage_of(name))]
            before = self.replicas.by_worker(stage_state.worker)
            if before is not None and before is not replica and before.alive:
                self._send((before.address, Abandon(state.id, name, stage_state.attempt)))
            stage_state.worker, stage_state.address = replica.worker, replica.address
            stage_state.attempt += 1
            stage_state.done = False
            stage_state.inputs_done.clear()
            state.slots[replica.slot] = None
            replica.requests.add(state.id)
            replica.working.add(state.id)
            self._at_rest(state, before)
            if name == state.input:
                self._unread.pop(state.id, None)
                replica.reading[state.id] = has_media(state)
        for replica in chosen.values():
            self._router.given(state, replica)
        self._send(*begins(state, begin))

    def _place_anew(self, state: RequestState, unplaced: Unplaced) -> dict[tuple[str, ...], Replica] | Unplaced:
        """Place every stage of a request anew, of which some cannot reach the others where they are."""
        before, state.waiting = state.waiting, set(state.stages)
        placed = self._router.place(state)
        if isinstance(placed, Unplaced) and placed.cut:
            state.waiting = before
            return unplaced
        return placed

    @staticmethod
    def _at_rest(state: RequestState, replica: Replica | None) -> None:
        """Record that a worker has nothing left to do for a request, if that is so."""
        if replica is not None and all(stage.done for stage in state.stages.values() if stage.worker == replica.worker):
            replica.working.discard(state.id)

    def _throttle(self, state: RequestState) -> None:
        """Pause the stages that answer the client while it is behind; let them go on when it has caught up."""
        if self.requests.get(state.id) is not state:
            return  # it ended: nothing more is made
        for name, stage_state in state.stages.items():
            stage = state.walk[stage_of(name)]
            # A new attempt is informed after its `Begin`. A stage whose output is encoded waits as well, before it uses
            # up the edge's budget, which other requests share.
            if (stage.to_client or stage.encoded) and name not in state.waiting and not stage_state.done:
                self._send(throttled(state, name))

    def _send(self, *messages: Addressed) -> None:
        for address, message in messages:
            self.supervisor.send(address, message)

    def _end(self, state: RequestState, error: SegueError | None) -> None:
        """End a request: notify its consumer and free what every stage holds for it."""
        if self.requests.pop(state.id, None) is None:
            return
        self._left.set()
        self._unread.pop(state.id, None)
        for timer in filter(None, (state.timer, state.patience)):
            timer.cancel()
        for replica in filter(None, map(self.replicas.in_slot, state.slots)):
            replica.working.discard(state.id)
            if state.id in replica.requests:  # its incarnation is the one that has, or had, them
                replica.requests.discard(state.id)
                if replica.alive:
                    self._send((replica.address, Drop(state.id)))
        if error is None and state.request.keep:
            self.kept.add(state)  # before the client can name it
        state.queue.put(error if error is not None else state.finished())
        self._note_idle()
        self.supervisor.moves.request_left()
        if state.losses:
            self._launch_waiting()  # another request's last retry may have waited for this one

    # ── messages of workers ────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: ToOrchestrator) -> None:
        """Handle a worker's message about a request."""
        match message:
            case Progress():
                for emission in message.emissions:
                    self._on_emission(message.worker, emission)
            case StageDone():
                self._reading_ended(message)
                if state := self._current(message.worker, message.request_id, message.stage, message.attempt):
                    try:
                        state.ended(message)
                    except SegueError as error:
                        self._end(state, error)
                        return
                    self._at_rest(state, self.replicas.by_worker(message.worker))
                    self._proceed(state)
            case InputDone():
                if state := self._current(message.worker, message.request_id, message.stage, message.attempt):
                    state.stages[message.stage].inputs_done.add(message.source)
            case InputLost():
                self._on_input_lost(message)
            case Unreachable() | Reachable():
                self._on_link(message)
            case Failed():
                self._reading_ended(message)
                if state := self._current(message.worker, message.request_id, message.stage, message.attempt):
                    stage = stage_of(message.stage)
                    self._end(state, error_from(message.kind, message.message, field=message.field, stage=stage))

    def _on_emission(self, worker: str, emission: Emission) -> None:
        state = self._current(worker, emission.request_id, emission.stage, emission.attempt)
        if state is None:
            return
        try:
            deltas = state.took(emission)
        except SegueError as error:  # of a condition on the output
            self._end(state, error)
            return
        for delta in deltas:
            if state.queue.put(delta):
                self._throttle(state)
        if emission.turn is not None and emission.stage == state.held:
            self._proceed(state)

    def _reading_ended(self, message: StageDone | Failed) -> None:
        """An input worker is done with a request, perhaps a cancelled one. If that one had media, start the next
        request with media that waits for a worker."""
        replica = self.replicas.by_worker(message.worker) if is_input(message.stage) else None
        if replica is None or not replica.reading.pop(message.request_id, False):
            return
        waiting = [state for one in self._unread if (state := self.requests[one]).input == message.stage]
        if waiting:
            self._launch(min(waiting, key=lambda state: state.request.priority), set())

    def _current(self, worker: str, request_id: str, stage: str, attempt: int) -> RequestState | None:
        """Return the state of the request that a message is about; None if the message is from a past attempt."""
        state = self.requests.get(request_id)
        if state is None:
            return None
        stage_state = state.stages.get(stage)
        if stage_state is None:
            return None
        return state if stage_state.worker == worker and stage_state.attempt == attempt else None

    # ── recovery ───────────────────────────────────────────────────────────────────────────────────────────────────

    def worker_ready(self) -> None:
        """Launch waiting requests: there is a new ready worker."""
        self._launch_waiting()

    def _launch_waiting(self) -> None:
        for state in list(self.requests.values()):
            if state.waiting:
                self._launch(state, set())

    def broken(self, error: BaseException) -> None:
        """End all requests, so that none waits forever."""
        for state in list(self.requests.values()):
            self._end(state, SegueError(f"the orchestrator failed: {error}"))

    def _on_input_lost(self, message: InputLost) -> None:
        state = self.requests.get(message.request_id)
        if state is None or state.stages[message.stage].attempt != message.attempt:
            return
        if message.stage in state.waiting:
            return  # it is about to restart anyway
        state.blamed.add(state.stages[message.source].worker)
        self._lost(state, {message.stage, message.source}, stage_of(message.source))

    def _on_link(self, message: Unreachable | Reachable) -> None:
        """Handle a lost connection between two workers, or its return. Messages that were on their way are lost with
        it: what has yet to come over it is made again, by workers that reach each other."""
        here, there = self.replicas.by_worker(message.worker), self.replicas.by_address(message.address)
        if here is None or there is None or not (here.alive and there.alive):
            return  # the supervisor finds out, or has
        if isinstance(message, Reachable):
            log.warning("worker %s reaches %s again", here.worker, there.worker)
            self._router.links.back(here, there)
            self._launch_waiting()
            return
        log.warning("worker %s (%s) cannot reach %s (%s)", here.worker, here.node, there.worker, there.node)
        self._router.links.lost(here, there)
        ends, nodes = {here.worker, there.worker}, {here.node, there.node}
        for state in list(self.requests.values()):
            across = stages_across(state.stages, nodes)
            if not across - state.waiting:
                continue
            known = bool(state.blamed & ends)
            state.blamed = state.blamed - ends if known else state.blamed | ends
            self._lost(state, self._with_fused(state, across), there.group[-1], counted=known)

    def _with_fused(self, state: RequestState, names: set[str]) -> set[str]:
        """Return these stages and those that share workers with them: fused stages move together."""
        groups = {self.replicas.group_of(stage_of(name)) for name in names}
        started = (name for name, stage in state.stages.items() if stage.worker)
        return names | {name for name in started if self.replicas.group_of(stage_of(name)) in groups}

    def _await_link(self, state: RequestState) -> None:
        """End a request with an error, unless its stages can be placed within `LINK_PATIENCE`."""
        if state.patience is not None:
            return

        def over() -> None:
            unplaced = self._router.place(state)
            if isinstance(unplaced, Unplaced) and unplaced.cut:
                stage = unplaced.group[-1]
                lost = self._router.links.names()
                what = f"stage {stage!r} cannot exchange data with others: no connection between {lost}"
                self._end(state, StageLost(what, stage=stage))

        state.patience = asyncio.get_running_loop().call_later(LINK_PATIENCE, over)

    def worker_lost(self, what: str, *, planned: bool = False) -> None:
        """Restart every affected request on other workers after a death, or fail it if its retries are spent."""
        alive = self.replicas.alive()
        self._router.links.keep(alive)
        for state in list(self.requests.values()):
            if state.given() and not state.workers() <= alive:
                self._end(state, None)  # the client has everything; only the dead workers' reports are lost
            elif stages_to_rerun(state.stages, alive, state.waiting) - state.waiting:
                self._lost(state, set(), what, counted=planned or bool(state.blamed - alive))
                state.blamed &= alive
            elif state.waiting:
                self._launch(state, set())

    def _lost(self, state: RequestState, again: set[str], what: str, *, counted: bool = False) -> None:
        """Restart stages after a loss. `counted`: this loss has been counted, at its first sign, or it was planned."""
        state.losses[what] += not counted
        if state.losses[what] > self.plan.limits.max_retries:
            tries = self.plan.limits.max_retries + 1
            message = f"stage {what!r} was lost {tries} times while serving this request"
            self._end(state, StageLost(message, stage=what))
            return
        self._launch(state, stages_to_rerun(state.stages, self.replicas.alive(), again | state.waiting))
