"""The orchestrator: admits requests, gives each stage of their walk to a worker, follows them, and recovers.

Payloads and chunks do not pass through here. It sees the journal (ids), what the client sees, and who is done; from
these books alone a request goes on when a worker dies (`segue.orchestrator.recovery`). One asyncio task reads the
workers' messages; everything else happens in their handlers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from segue.graph.deployment import Plan
from segue.graph.stage_graph import INPUT
from segue.messages.deltas import Delta, Finished
from segue.messages.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    SegueError,
    ShuttingDown,
    StageLost,
    error_from,
)
from segue.messages.process import WorkerSpec
from segue.messages.request import Request
from segue.messages.wire import (
    Begin,
    Drop,
    Failed,
    InputDone,
    InputLost,
    Loading,
    Moved,
    Peer,
    PeerLost,
    Ping,
    Progress,
    Ready,
    Resend,
    Shutdown,
    StageDone,
    StartFailed,
    Stats,
    ToWorker,
    decode_for_orchestrator,
    encode,
)
from segue.orchestrator.books import RequestBooks
from segue.orchestrator.placement import LocalPlacement
from segue.orchestrator.recovery import StageBook, stages_to_rerun
from segue.orchestrator.replicas import Replica, Replicas

log = logging.getLogger(__name__)

GIVE_UP_AFTER = 3
"""Deaths in a row before ready; then the replica is given up."""

OnProgress = Callable[[str, float, str], None]
"""(worker, fraction, what)"""


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
        self._family = family
        self._model_dir = model_dir
        self._load_format = load_format
        self._on_progress = on_progress or (lambda worker, fraction, what: None)
        self.replicas = Replicas(plan.groups, {name: stage.replicas for name, stage in plan.stages.items()})
        self.stats: dict[str, Stats] = {}
        """By worker incarnation."""
        self.requests: dict[str, RequestBooks] = {}
        self._placement = LocalPlacement(
            preload, on_spawned=self._on_spawned, on_exit=self._on_exit, on_lost=self._on_placement_lost
        )
        self._context: zmq.Context[Any] = zmq.Context()
        self._out: dict[str, zmq.Socket[bytes]] = {}
        self._inbox: zmq.asyncio.Socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._started: asyncio.Future[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self.address = ""

    @property
    def runtime_dir(self) -> str:
        """Where the sockets of this system are; gone when it has stopped."""
        return self._placement.runtime_dir

    # ── life ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Return when every stage has a ready replica; raise the first worker's own error otherwise."""
        self._started = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        try:
            await self._open()
            await self._started
        except BaseException:
            await self.stop(drain=False)
            raise

    async def _open(self) -> None:
        """Start the fork server, bind the inbox, spawn every replica."""
        await self._placement.start()
        self.address = f"ipc://{self._placement.runtime_dir}/orchestrator"
        self._inbox = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(self.address)
        self._spawn_task(self._read(self._inbox))
        for replica in self.replicas.all:
            self._spawn(replica)
        self._watch_over()

    async def stop(self, *, drain: bool = True) -> None:
        """Admit nothing more, let running requests finish within `limits.drain_seconds`, end every process."""
        self._stopping = True
        if drain and self.requests:
            try:
                async with asyncio.timeout(self.plan.limits.drain_seconds):
                    await self._idle.wait()
            except TimeoutError:
                log.warning("%d requests were still running when the drain time was over", len(self.requests))
        for books in list(self.requests.values()):
            self._end(books, ShuttingDown("the server is shutting down"))
        if self._watch is not None:
            self._watch.cancel()
        for replica in self.replicas.all:
            if replica.state == "ready":
                self._send(replica.address, Shutdown())
            replica.state = "draining"
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._placement.close()
        for socket in [*self._out.values(), *filter(None, [self._inbox])]:
            socket.close(linger=0)
        self._out.clear()
        self._context.term()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Deltas as they are made, `Finished` last; raises `SegueError`. Closing the generator cancels the request."""
        books = self._admit(request)
        try:
            while True:
                item = await books.queue.get()
                if isinstance(item, SegueError):
                    raise item
                yield item
                if isinstance(item, Finished):
                    return
        finally:
            if books.id in self.requests:
                self._end(books, Cancelled("the client went away"))

    def _admit(self, request: Request) -> RequestBooks:
        if self._stopping:
            raise ShuttingDown("the server is shutting down")
        limit = self.plan.limits.max_waiting
        if len(self.requests) >= limit:
            raise Overloaded(f"{limit} requests are in the system already (limits.max_waiting); try again later")
        if request.request_id in self.requests:
            raise InvalidRequest(f"a request with id {request.request_id!r} is running", field="request_id")
        walk = self.graph.walk(request)
        if request.seed is None:
            request.seed = secrets.randbits(63)
        books = RequestBooks(request=request, walk=walk, main=self.graph.main)
        for stage in walk.stages:
            books.stages[stage.name] = StageBook(tuple(stage.upstreams), tuple(stage.downstreams))
            if self.graph.stages[stage.name].engine == "autoregressive":
                books.journal[stage.name] = {}
        if books.main not in books.stages:
            books.main = next(stage.name for stage in reversed(walk.stages) if stage.to_client)
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

    def _launch(self, books: RequestBooks, names: set[str]) -> None:
        """Begin stages (again) as soon as each has a ready worker."""
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
                return  # `_on_ready` comes back here
            chosen[group] = replica
        begin, books.waiting = books.waiting, set()
        for name in begin:
            book, replica = books.stages[name], chosen[self.replicas.group_of(name)]
            book.worker, book.address = replica.worker, replica.address
            book.attempt += 1
            book.done = False
            book.inputs_done.clear()
            replica.requests.add(books.id)
        self._send_begins(books, begin)

    def _replica_for(self, books: RequestBooks, group: tuple[str, ...]) -> Replica | None:
        """The worker that has other stages of this request's group already, else the least loaded one."""
        held = {books.stages[stage].worker for stage in group if stage in books.stages}
        for replica in self.replicas.all:
            if replica.group == group and replica.state == "ready" and replica.worker in held:
                return replica
        return self.replicas.least_loaded(group[0])

    def _send_begins(self, books: RequestBooks, begin: set[str]) -> None:
        """Downstream stages first, so that chunks seldom overtake their `Begin`."""
        stripped = msgspec.structs.replace(books.request, messages=[], prompt=None, prompt_token_ids=None)
        for stage in reversed(books.walk.stages):
            name, book = stage.name, books.stages[stage.name]
            if name not in begin:
                continue
            message = Begin(
                request=books.request if name == INPUT else stripped,
                stage=name,
                attempt=book.attempt,
                upstreams=[self._peer(books, up) for up in book.upstreams],
                downstreams=[self._peer(books, down) for down in book.downstreams],
                to_client=sorted(stage.to_client),
                resume=books.resume(name),
            )
            self._send(book.address, message)
            for down in book.downstreams:
                if down not in begin and not books.stages[down].done:
                    self._send(books.stages[down].address, Moved(books.id, self._peer(books, name), down))
        for name in begin:
            for up in books.stages[name].upstreams:
                if up not in begin:
                    self._send(books.stages[up].address, Resend(books.id, up, self._peer(books, name)))

    @staticmethod
    def _peer(books: RequestBooks, stage: str) -> Peer:
        book = books.stages[stage]
        return Peer(stage, book.worker, book.address, book.attempt)

    def _end(self, books: RequestBooks, error: SegueError | None) -> None:
        """The request is over: tell its consumer and free what every stage holds."""
        if self.requests.pop(books.id, None) is None:
            return
        if books.timer is not None:
            books.timer.cancel()
        workers = books.workers()
        for replica in self.replicas.all:
            replica.requests.discard(books.id)
            if replica.worker in workers and replica.state == "ready":
                self._send(replica.address, Drop(books.id))
        books.queue.put_nowait(error if error is not None else books.finished())
        if not self.requests:
            self._idle.set()

    # ── what workers say ───────────────────────────────────────────────────────────────────────────────────────────

    async def _read(self, inbox: zmq.asyncio.Socket) -> None:
        while True:
            message = decode_for_orchestrator(await inbox.recv())
            match message:
                case Progress():
                    for emission in message.emissions:
                        books = self._current(message.worker, emission.request_id, emission.stage, emission.attempt)
                        for delta in books.took(emission) if books else ():
                            assert books is not None
                            books.queue.put_nowait(delta)
                case StageDone():
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
                    if books := self._current(message.worker, message.request_id, message.stage, message.attempt):
                        error = error_from(message.kind, message.message, field=message.field, stage=message.stage)
                        self._end(books, error)
                case Stats():
                    self._on_stats(message)
                case Loading():
                    self._on_loading(message)
                case Ready():
                    self._on_ready(message)
                case StartFailed():
                    self._on_start_failed(message)

    def _current(self, worker: str, request_id: str, stage: str, attempt: int) -> RequestBooks | None:
        """The books a message is about, unless it speaks for an attempt that is over."""
        books = self.requests.get(request_id)
        if books is None:
            return None
        book = books.stages[stage]
        return books if book.worker == worker and book.attempt == attempt else None

    # ── supervision ────────────────────────────────────────────────────────────────────────────────────────────────

    def _spawn(self, replica: Replica) -> None:
        replica.incarnation += 1
        replica.state = "starting" if replica.incarnation == 1 else "restarting"
        replica.pid, replica.loading, replica.what, replica.pinged = None, 0.0, "forking", None
        directory = self._placement.runtime_dir
        replica.address = f"ipc://{directory}/{replica.worker}"
        mine = set(replica.group)
        edges = [edge for edge in self.plan.edges if edge.source in mine or edge.target in mine]
        self._placement.spawn(
            WorkerSpec(
                worker=replica.worker,
                replica=replica.index,
                family=self._family,
                model_dir=self._model_dir,
                stages=[msgspec.to_builtins(self.plan.stages[name]) for name in replica.group],
                edges=[msgspec.to_builtins(edge) for edge in edges],
                replayable=[name for name, stage in self.plan.stages.items() if stage.engine == "module"],
                limits=msgspec.to_builtins(self.plan.limits),
                inbox=replica.address,
                orchestrator=self.address,
                connector=f"{directory}/{replica.worker}.shm",
                load_format=self._load_format,
            )
        )

    def _on_spawned(self, worker: str, pid: int) -> None:
        if replica := self.replicas.by_worker(worker):
            replica.pid = pid

    def _on_loading(self, message: Loading) -> None:
        if replica := self.replicas.by_worker(message.worker):
            replica.loading, replica.what = message.fraction, message.what
            self._on_progress(message.worker, message.fraction, message.what)

    def _on_ready(self, message: Ready) -> None:
        replica = self.replicas.by_worker(message.worker)
        if replica is None or replica.state == "failed":
            return  # it has died since
        replica.state, replica.loading, replica.failures = "ready", 1.0, 0
        self.replicas.facts.update(message.stages)
        self._on_progress(message.worker, 1.0, "ready")
        if self._started is not None and not self._started.done() and self.replicas.ready():
            self._started.set_result(None)
        for books in list(self.requests.values()):
            if books.waiting:
                self._launch(books, set())

    def _on_stats(self, message: Stats) -> None:
        if replica := self.replicas.by_worker(message.worker):
            self.stats[message.worker] = message
            replica.pinged = None

    def _on_input_lost(self, message: InputLost) -> None:
        books = self.requests.get(message.request_id)
        if books is None or books.stages[message.stage].attempt != message.attempt:
            return
        if message.stage in books.waiting:
            return  # it is about to begin anew already
        books.blamed.add(books.stages[message.source].worker)
        self._lost(books, {message.stage, message.source}, message.source)

    def _watch_over(self) -> None:
        """Ask the workers that have something to do for a sign of life; kill those that have owed it for too long."""
        limit, now = self.plan.limits.hang_seconds, time.monotonic()
        for replica in self.replicas.all:
            if replica.state != "ready":
                continue
            if replica.pinged is None:
                if replica.requests:
                    replica.pinged = now
                    self._send(replica.address, Ping())
            elif now - replica.pinged >= limit and replica.pid is not None:
                log.error(
                    "worker %s (pid %s) has not answered for %g s: killing it", replica.worker, replica.pid, limit
                )
                self._placement.kill(replica.pid)
        self._watch = self._loop.call_later(limit / 4, self._watch_over)

    def _on_start_failed(self, message: StartFailed) -> None:
        error = ConfigError(f"worker {message.worker!r} could not start: {message.message}", stage=message.worker)
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)  # whoever starts says it
        else:
            log.error("%s", error)

    def _on_exit(self, worker: str, how: str) -> None:
        replica = self.replicas.by_worker(worker)
        if replica is None or self._stopping:
            return
        was_ready = replica.state == "ready"
        log.warning("worker %s (pid %s) ended: %s", worker, replica.pid, how)
        if not was_ready:
            replica.failures += 1
            if self._started is not None and not self._started.done():
                # its own StartFailed may still be on the way; it is the better answer
                self._loop.call_later(0.5, self._fail_start, f"worker {worker!r} died while starting: {how}")
                replica.state = "failed"
                return
        self._bury(replica)
        if replica.failures >= GIVE_UP_AFTER:
            replica.state = "failed"
        else:
            self._spawn(replica)
        self._recover(replica.group[-1])

    def _fail_start(self, why: str) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(ConfigError(why))

    def _bury(self, replica: Replica) -> None:
        """Nobody is to write to this incarnation any more."""
        dead, address = replica.worker, replica.address
        replica.state = "restarting"
        replica.requests.clear()
        self.stats.pop(dead, None)
        if socket := self._out.pop(address, None):
            socket.close(linger=0)
        for other in self.replicas.all:
            if other.state == "ready":
                self._send(other.address, PeerLost(dead, address))

    def _recover(self, what: str) -> None:
        """Let every request that a death touched go on elsewhere, or fail it when its retries are spent."""
        alive = self.replicas.alive()
        for books in list(self.requests.values()):
            placed = {name: book for name, book in books.stages.items() if book.worker}
            if stages_to_rerun(placed, alive) - books.waiting:
                self._lost(books, set(), what, counted=bool(books.blamed - alive))
                books.blamed &= alive
            elif books.waiting:
                self._launch(books, set())

    def _lost(self, books: RequestBooks, again: set[str], what: str, *, counted: bool = False) -> None:
        """`counted`: this loss was, when the first sign of it came."""
        books.losses[what] += not counted
        if books.losses[what] > self.plan.limits.max_retries:
            tries = self.plan.limits.max_retries + 1
            message = f"stage {what!r} was lost {tries} times while serving this request"
            self._end(books, StageLost(message, stage=what))
            return
        self._launch(books, stages_to_rerun(books.stages, self.replicas.alive(), again))

    def _on_placement_lost(self) -> None:
        """The fork server died and took every worker along: start it all again."""
        if self._stopping:
            return
        if self._started is not None and not self._started.done():
            self._started.set_exception(ConfigError("the fork server died while the stages were loading"))
            return
        log.error("the fork server died; starting every worker again")
        self._spawn_task(self._reopen())

    async def _reopen(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for replica in self.replicas.all:
            self._bury(replica)
        for socket in [*self._out.values(), *filter(None, [self._inbox])]:
            socket.close(linger=0)
        self._out.clear()
        await self._placement.close()
        await self._open()
        self._recover("the fork server")

    # ── plumbing ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, address: str, message: ToWorker) -> None:
        socket = self._out.get(address)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.connect(address)
            self._out[address] = socket
        socket.send(encode(message))

    def _spawn_task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A reader that dies is our own mistake, a fork server that does not come back the machine's: no request may
        wait for them in vain, and `/health` says so."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or isinstance(error, zmq.ZMQError):
            return
        log.error("the orchestrator's own task failed", exc_info=error)
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        for replica in self.replicas.all:
            replica.state = "failed"
        for books in list(self.requests.values()):
            self._end(books, SegueError(f"the orchestrator failed: {error}"))
