"""The orchestrator: admits requests, gives each stage of their walk to a worker, follows them, and recovers.

Payloads and chunks do not pass through here. It sees the journal (ids), what the client sees, and who is done; from
these books alone a request goes on when a worker dies (`segue.orchestrator.recovery`). One asyncio task, the
supervisor's, reads the workers' messages; everything else happens in their handlers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator

import msgspec

from segue.graph.deployment import Plan
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
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.messages.wire import (
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
    ToOrchestrator,
)
from segue.orchestrator.books import RequestBooks
from segue.orchestrator.recovery import StageBook, stages_to_rerun
from segue.orchestrator.replicas import Replica
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
        self.requests: dict[str, RequestBooks] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._left = asyncio.Event()
        """Set whenever a request leaves."""

    @property
    def stats(self) -> dict[str, Stats]:
        """The last word of each worker."""
        return self.supervisor.stats

    @property
    def runtime_dir(self) -> str:
        """Where the sockets of this system are; gone when it has stopped."""
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
        """`finish`, and end every process."""
        await self.finish(drain=drain)
        await self.supervisor.close()

    async def finish(self, *, drain: bool = True) -> None:
        """Admit nothing more, let running requests finish within `limits.drain_seconds`, end those that do not with
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

    async def room(self) -> None:
        """Return when there are fewer requests than `limits.max_waiting`, or no more are admitted at all."""
        while len(self.requests) >= self.plan.limits.max_waiting and not self.supervisor.stopping:
            self._left.clear()
            await self._left.wait()

    def _admit(self, request: Request) -> RequestBooks:
        if self.supervisor.stopping:
            raise ShuttingDown("the server is shutting down")
        limit = self.plan.limits.max_waiting
        if len(self.requests) >= limit:
            raise Overloaded(f"{limit} requests are in the system already (limits.max_waiting); try again later")
        if request.request_id in self.requests:
            raise InvalidRequest(f"a request with id {request.request_id!r} is running", field="request_id")
        walk = self.graph.walk(request)
        if request.seed is None:
            request.seed = secrets.randbits(63)
        for name in walk:
            planned = self.plan.stages[name].sampling
            keep, side = planned.truncate_prompt_tokens, planned.truncation_side
            if keep is not None or side is not None:  # the input stage cuts prompts, and knows no other stage's plan
                asked = request.sampling.get(name, SamplingParams())
                default = SamplingParams(truncate_prompt_tokens=keep, truncation_side=side)
                request.sampling = {**request.sampling, name: asked.over(default)}
        books = RequestBooks(request=request, walk=walk, main=self.graph.main)
        for name, stage in walk.items():
            books.stages[name] = StageBook(tuple(stage.upstreams), tuple(stage.downstreams))
            if self.plan.stages[name].engine == "autoregressive":
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
                return  # `worker_ready` comes back here
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
        """The worker that has other stages of this request's group already, else the least loaded one.

        Last tries do not share a worker: when workers die of one request, those that were there each time are told
        from it in the end, and it alone is lost.
        """
        held = {books.stages[stage].worker for stage in group if stage in books.stages}
        for replica in self.replicas.all:
            if replica.group == group and replica.state == "ready" and replica.worker in held:
                return replica
        chosen = self.replicas.least_loaded(group[0])
        if chosen is not None and self._last_try(books, group):
            others = (self.requests[other] for other in chosen.requests if other != books.id)
            if any(self._last_try(other, group) for other in others):
                return None  # `_end` comes back here
        return chosen

    def _last_try(self, books: RequestBooks, group: tuple[str, ...]) -> bool:
        return any(0 < books.losses[stage] == self.plan.limits.max_retries for stage in group)

    def _send_begins(self, books: RequestBooks, begin: set[str]) -> None:
        """Downstream stages first, so that chunks seldom overtake their `Begin`."""
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
            )
            self.supervisor.send(book.address, message)
            for down in book.downstreams:
                if down not in begin and not books.stages[down].done:
                    self.supervisor.send(books.stages[down].address, Moved(books.id, self._peer(books, name), down))
        for name in begin:
            for up in books.stages[name].upstreams:
                if up not in begin:
                    self.supervisor.send(books.stages[up].address, Resend(books.id, up, self._peer(books, name)))

    @staticmethod
    def _peer(books: RequestBooks, stage: str) -> Peer:
        book = books.stages[stage]
        return Peer(stage, book.worker, book.address, book.attempt)

    def _end(self, books: RequestBooks, error: SegueError | None) -> None:
        """The request is over: tell its consumer and free what every stage holds."""
        if self.requests.pop(books.id, None) is None:
            return
        self._left.set()
        if books.timer is not None:
            books.timer.cancel()
        workers = books.workers()
        for replica in self.replicas.all:
            replica.requests.discard(books.id)
            if replica.worker in workers and replica.state == "ready":
                self.supervisor.send(replica.address, Drop(books.id))
        books.queue.put_nowait(error if error is not None else books.finished())
        if not self.requests:
            self._idle.set()
        if books.losses:
            self._launch_waiting()  # another's last try may have waited for this one

    # ── what workers say ───────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, message: ToOrchestrator) -> None:
        """What a worker says of a request."""
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

    def _current(self, worker: str, request_id: str, stage: str, attempt: int) -> RequestBooks | None:
        """The books a message is about, unless it speaks for an attempt that is over."""
        books = self.requests.get(request_id)
        if books is None:
            return None
        book = books.stages[stage]
        return books if book.worker == worker and book.attempt == attempt else None

    # ── recovery ───────────────────────────────────────────────────────────────────────────────────────────────────

    def worker_ready(self) -> None:
        """There is one worker more to give stages to."""
        self._launch_waiting()

    def _launch_waiting(self) -> None:
        for books in list(self.requests.values()):
            if books.waiting:
                self._launch(books, set())

    def broken(self, error: BaseException) -> None:
        """No request may wait in vain."""
        for books in list(self.requests.values()):
            self._end(books, SegueError(f"the orchestrator failed: {error}"))

    def _on_input_lost(self, message: InputLost) -> None:
        books = self.requests.get(message.request_id)
        if books is None or books.stages[message.stage].attempt != message.attempt:
            return
        if message.stage in books.waiting:
            return  # it is about to begin anew already
        books.blamed.add(books.stages[message.source].worker)
        self._lost(books, {message.stage, message.source}, message.source)

    def worker_lost(self, what: str) -> None:
        """Let every request that a death touched go on elsewhere, or fail it when its retries are spent."""
        alive = self.replicas.alive()
        for books in list(self.requests.values()):
            placed = {name: book for name, book in books.stages.items() if book.worker}
            if books.given() and not books.workers() <= alive:
                self._end(books, None)  # what the dead had to tell is lost, and nothing of it is missing to the client
            elif stages_to_rerun(placed, alive) - books.waiting:
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
