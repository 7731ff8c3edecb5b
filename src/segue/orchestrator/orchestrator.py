"""The orchestrator admits requests, assigns each stage of their walk to a worker, tracks them, and recovers them.

Payloads and chunks do not pass through it. It sees the journal (ids), the client's output, and which stages are done;
this state is enough to continue a request when a worker dies (`segue.orchestrator.request_state`). One asyncio task,
the supervisor's, reads the workers' messages; everything else happens in their handlers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from segue.graph.deployment.deployment import Plan
from segue.graph.kinds.registry import kind_of
from segue.graph.stage_graph import INPUT
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
from segue.messages.request import Piece, Request
from segue.messages.sampling import SamplingParams, merged
from segue.messages.wire import (
    Append,
    Begin,
    Drop,
    Failed,
    InputDone,
    InputLost,
    Moved,
    Peer,
    Progress,
    Resend,
    StageDone,
    Stats,
    Throttle,
    ToOrchestrator,
)
from segue.orchestrator.client_queue import ClientQueue
from segue.orchestrator.replicas import Replica
from segue.orchestrator.request_state import RequestState, StageState, stages_to_rerun
from segue.orchestrator.supervisor import OnProgress, Supervisor

log = logging.getLogger(__name__)


class Orchestrator:
    """A running graph. `start`, then `stream` requests, then `stop`."""

    def __init__(
        self,
        plan: Plan,
        *,
        family: str,
        model_dir: str,
        preload: list[str],
        load_format: str = "auto",
        on_progress: OnProgress | None = None,
    ) -> None:
        self.plan = plan
        self.graph = plan.graph
        self.supervisor = Supervisor(
            plan,
            self,
            family=family,
            model_dir=model_dir,
            preload=preload,
            load_format=load_format,
            on_progress=on_progress,
        )
        self.replicas = self.supervisor.replicas
        self.requests: dict[str, RequestState] = {}
        self._unread: dict[str, None] = {}
        """Requests with media that wait for an input worker, in order of arrival."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._left = asyncio.Event()
        """Set whenever a request ends."""

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
        if drain and self.requests:
            try:
                async with asyncio.timeout(self.plan.limits.drain_seconds):
                    await self._idle.wait()
            except TimeoutError:
                log.warning("%d requests were still running when the drain time was over", len(self.requests))
        for books in list(self.requests.values()):
            self._end(books, ShuttingDown("the server is shutting down"))

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Yield deltas, `Finished` last; raises `SegueError`. Closing the generator cancels the request."""
        async with aclosing(self.deltas(self.admit(request))) as deltas:
            async for item in deltas:
                yield item

    async def deltas(self, books: RequestState) -> AsyncGenerator[Delta]:
        """As `stream`, for a request that has been admitted."""
        try:
            while True:
                item, caught_up = await books.queue.get()
                if caught_up:
                    self._throttle(books)
                if isinstance(item, SegueError):
                    raise item
                yield item
                if isinstance(item, Finished):
                    return
        finally:
            self.cancel(books)

    def cancel(self, books: RequestState) -> None:
        """End a request that its client has given up, unless it has ended."""
        if self.requests.get(books.id) is books:
            self._end(books, Cancelled("the client went away"))

    def append(self, books: RequestState, piece: Piece | None) -> bool:
        """Append input to an open request; None: close its input. False: the request has ended."""
        if self.requests.get(books.id) is not books:
            return False
        books.appended.append(piece)
        # a new attempt gets all pieces after its `Begin`
        if INPUT not in books.waiting and books.stages[INPUT].worker in self.replicas.alive():
            self._send_piece(books, piece)
        return True

    def _send_piece(self, books: RequestState, piece: Piece | None) -> None:
        book = books.stages[INPUT]
        self.supervisor.send(book.address, Append(books.id, INPUT, book.attempt, piece))

    async def room(self) -> None:
        """Return when there are fewer requests than `limits.max_waiting`, or when no more are admitted."""
        while len(self.requests) >= self.plan.limits.max_waiting and not self.supervisor.stopping:
            self._left.clear()
            await self._left.wait()

    def admit(self, request: Request) -> RequestState:
        """Admit a request. Raises `SegueError` if it cannot be served now."""
        if self.supervisor.stopping:
            raise ShuttingDown("the server is shutting down")
        limit = self.plan.limits.max_waiting
        if len(self.requests) >= limit:
            raise Overloaded(f"the system already has {limit} requests (limits.max_waiting); try again later")
        if request.request_id in self.requests:
            raise InvalidRequest(f"a request with id {request.request_id!r} is running", field="request_id")
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
        books = RequestState(request=request, walk=walk, main=self.graph.main, queue=queue)
        for name, stage in walk.items():
            books.stages[name] = StageState(tuple(stage.upstreams), tuple(stage.downstreams))
            if kind_of(self.plan.stages[name].engine).samples:
                books.journal[name] = {}
        if books.main not in books.stages:
            books.main = next(name for name, stage in reversed(walk.items()) if stage.to_client)
        deadline = request.deadline
        if deadline is None and self.plan.limits.default_deadline is not None:
            deadline = time.time() + self.plan.limits.default_deadline
        if deadline is not None:
            books.timer = self._loop.call_later(
                max(0.0, deadline - time.time()),
                lambda: self._end(books, DeadlineExceeded("the request's deadline passed before it was finished")),
            )
        self.requests[books.id] = books
        self._idle.clear()
        self._launch(books, set(books.stages))
        return books

    def _launch(self, books: RequestState, names: set[str]) -> None:
        """Start or restart stages as soon as each has a ready worker."""
        books.waiting |= names
        chosen: dict[tuple[str, ...], Replica] = {}
        for name in books.waiting:
            group = self.replicas.group_of(name)
            if group in chosen:
                continue
            replica = self._replica_for(books, group)
            if replica is None:
                if self.replicas.hopeless(name):
                    self._end(books, StageLost(f"stage {name!r} could not be restarted", stage=name))
                elif group == (INPUT,):
                    self._unread[books.id] = None  # `_read` calls this again
                return  # `worker_ready` calls this again
            chosen[group] = replica
        begin, books.waiting = books.waiting, set()
        for name in begin:
            book, replica = books.stages[name], chosen[self.replicas.group_of(name)]
            book.worker, book.address = replica.worker, replica.address
            book.attempt += 1
            book.done = False
            book.inputs_done.clear()
            replica.requests.add(books.id)
            if name == INPUT:
                self._unread.pop(books.id, None)
                replica.reading[books.id] = _has_media(books.request)
        self._send_begins(books, begin)

    def _replica_for(self, books: RequestState, group: tuple[str, ...]) -> Replica | None:
        """Return the worker that already has other stages of this group for the request, else the least loaded one.

        Requests on their last retry do not share a worker: if one request kills its workers, the others that were
        there each time then survive, and only the poison request fails.
        """
        held = {books.stages[stage].worker for stage in group if stage in books.stages}
        for replica in self.replicas.all:
            if replica.group == group and replica.state == "ready" and replica.worker in held:
                return replica
        if group == (INPUT,):
            chosen = self.replicas.reader(media=_has_media(books.request))
        else:
            chosen = self.replicas.least_loaded(group[0])
        if chosen is not None and self._last_try(books, group):
            others = (self.requests[other] for other in chosen.requests if other != books.id)
            if any(self._last_try(other, group) for other in others):
                return None  # `_end` leads here again
        return chosen

    def _last_try(self, books: RequestState, group: tuple[str, ...]) -> bool:
        return any(0 < books.losses[stage] == self.plan.limits.max_retries for stage in group)

    def _send_begins(self, books: RequestState, begin: set[str]) -> None:
        """Send `Begin` to downstream stages first, so that chunks seldom overtake it."""
        stripped = msgspec.structs.replace(
            books.request, messages=[], prompt=None, prompt_token_ids=None, prompt_embeds=None
        )
        for name, stage in reversed(books.walk.items()):
            if name not in begin:
                continue
            book = books.stages[name]
            message = Begin(
                request=books.request if name == INPUT else stripped,
                stage=name,
                attempt=book.attempt,
                upstreams=[self._peer(books, up) for up in book.upstreams],
                downstreams=[self._peer(books, down) for down in book.downstreams],
                to_client=sorted(stage.to_client),
                resume=books.resume(name),
                turns=books.turns.get(name, []),
            )
            self.supervisor.send(book.address, message)
            for piece in books.appended if name == INPUT else ():
                self._send_piece(books, piece)
            if books.queue.behind and stage.to_client:
                self._send_throttle(books, name)
            for down in book.downstreams:
                if down not in begin and not books.stages[down].done:
                    self.supervisor.send(books.stages[down].address, Moved(books.id, self._peer(books, name), down))
        for name in begin:
            for up in books.stages[name].upstreams:
                if up not in begin:
                    self.supervisor.send(books.stages[up].address, Resend(books.id, up, self._peer(books, name)))

    def _throttle(self, books: RequestState) -> None:
        """Pause the stages that answer the client while it is behind; let them go on when it has caught up."""
        if self.requests.get(books.id) is not books:
            return  # it ended: nothing more is made
        for name, stage in books.walk.items():
            # a new attempt is informed after its `Begin`
            if stage.to_client and name not in books.waiting and not books.stages[name].done:
                self._send_throttle(books, name)

    def _send_throttle(self, books: RequestState, stage: str) -> None:
        book = books.stages[stage]
        self.supervisor.send(book.address, Throttle(books.id, stage, book.attempt, books.queue.behind))

    @staticmethod
    def _peer(books: RequestState, stage: str) -> Peer:
        book = books.stages[stage]
        return Peer(stage, book.worker, book.address, book.attempt)

    def _end(self, books: RequestState, error: SegueError | None) -> None:
        """End a request: notify its consumer and free what every stage holds for it."""
        if self.requests.pop(books.id, None) is None:
            return
        self._left.set()
        self._unread.pop(books.id, None)
        if books.timer is not None:
            books.timer.cancel()
        workers = books.workers()
        for replica in self.replicas.all:
            replica.requests.discard(books.id)
            if replica.worker in workers and replica.state == "ready":
                self.supervisor.send(replica.address, Drop(books.id))
        books.queue.put(error if error is not None else books.finished())
        if not self.requests:
            self._idle.set()
        if books.losses:
            self._launch_waiting()  # another request's last retry may have waited for this one

    # ── messages of workers ────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: ToOrchestrator) -> None:
        """Handle a worker's message about a request."""
        match message:
            case Progress():
                for emission in message.emissions:
                    books = self._current(message.worker, emission.request_id, emission.stage, emission.attempt)
                    for delta in books.took(emission) if books else ():
                        assert books is not None
                        if books.queue.put(delta):
                            self._throttle(books)
            case StageDone():
                self._read(message)
                if books := self._current(message.worker, message.request_id, message.stage, message.attempt):
                    books.ended(message)
                    if books.complete():
                        self._end(books, None)
            case InputDone():
                if books := self._current(message.worker, message.request_id, message.stage, message.attempt):
                    books.stages[message.stage].inputs_done.add(message.source)
            case InputLost():
                self._on_input_lost(message)
            case Failed():
                self._read(message)
                if books := self._current(message.worker, message.request_id, message.stage, message.attempt):
                    error = error_from(message.kind, message.message, field=message.field, stage=message.stage)
                    self._end(books, error)

    def _read(self, message: StageDone | Failed) -> None:
        """Start the next waiting request when an input worker is done with one, even a cancelled one, that has
        media."""
        replica = self.replicas.by_worker(message.worker) if message.stage == INPUT else None
        if replica is None or not replica.reading.pop(message.request_id, False):
            return
        waiting = [self.requests[one] for one in self._unread]
        if waiting:
            self._launch(min(waiting, key=lambda books: books.request.priority), set())

    def _current(self, worker: str, request_id: str, stage: str, attempt: int) -> RequestState | None:
        """Return the state of the request that a message is about; None if the message is from a past attempt."""
        books = self.requests.get(request_id)
        if books is None:
            return None
        book = books.stages[stage]
        return books if book.worker == worker and book.attempt == attempt else None

    # ── recovery ───────────────────────────────────────────────────────────────────────────────────────────────────

    def worker_ready(self) -> None:
        """Launch waiting requests: there is a new ready worker."""
        self._launch_waiting()

    def _launch_waiting(self) -> None:
        for books in list(self.requests.values()):
            if books.waiting:
                self._launch(books, set())

    def broken(self, error: BaseException) -> None:
        """End all requests, so that none waits forever."""
        for books in list(self.requests.values()):
            self._end(books, SegueError(f"the orchestrator failed: {error}"))

    def _on_input_lost(self, message: InputLost) -> None:
        books = self.requests.get(message.request_id)
        if books is None or books.stages[message.stage].attempt != message.attempt:
            return
        if message.stage in books.waiting:
            return  # it is about to restart anyway
        books.blamed.add(books.stages[message.source].worker)
        self._lost(books, {message.stage, message.source}, message.source)

    def worker_lost(self, what: str) -> None:
        """Restart every affected request on other workers after a death, or fail it if its retries are spent."""
        alive = self.replicas.alive()
        for books in list(self.requests.values()):
            placed = {name: book for name, book in books.stages.items() if book.worker}
            if books.given() and not books.workers() <= alive:
                self._end(books, None)  # the client has everything; only the dead workers' reports are lost
            elif stages_to_rerun(placed, alive) - books.waiting:
                self._lost(books, set(), what, counted=bool(books.blamed - alive))
                books.blamed &= alive
            elif books.waiting:
                self._launch(books, set())

    def _lost(self, books: RequestState, again: set[str], what: str, *, counted: bool = False) -> None:
        """Restart stages after a loss. `counted`: this loss has been counted, at its first sign."""
        books.losses[what] += not counted
        if books.losses[what] > self.plan.limits.max_retries:
            tries = self.plan.limits.max_retries + 1
            message = f"stage {what!r} was lost {tries} times while serving this request"
            self._end(books, StageLost(message, stage=what))
            return
        self._launch(books, stages_to_rerun(books.stages, self.replicas.alive(), again))


def _has_media(request: Request) -> bool:
    """Whether the input stage has to read more than text and ids."""
    return bool(request.prompt_embeds or request.media_kinds() or request.embedded())
