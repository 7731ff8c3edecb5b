"""One worker: the stages of one replica group, in one process.

The loop drains the inbox, lets each engine that has work take one step, and for each output applies the edge's transfer
and sends the result. It waits only on the inbox, and only when no engine has work: nothing here polls or sleeps.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterable

from segue.connectors.base import Arrived, Coming, Connector, Gone
from segue.engines.contract import Holds, StageOutput
from segue.graph.parts import CLIENT, OUTPUT, is_input, own_name, stage_of
from segue.messages.addresses import node_of
from segue.messages.errors import Cancelled, InvalidRequest, SegueError
from segue.messages.process import WorkerSpec
from segue.messages.wire import (
    Abandon,
    Append,
    Begin,
    Chunk,
    Close,
    Consumed,
    Drop,
    Emission,
    Failed,
    Forgo,
    InputDone,
    InputLost,
    LoadAdapter,
    Moved,
    Peer,
    PeerLost,
    Ping,
    Progress,
    Reachable,
    Ready,
    Resend,
    Return,
    Shutdown,
    StageDone,
    Throttle,
    ToOrchestrator,
    ToWorker,
    UnloadAdapter,
    Unreachable,
    decode_for_worker,
    encode,
)
from segue.worker.build import Built
from segue.worker.deltas import file_parts
from segue.worker.edges.arrivals import Arrivals
from segue.worker.edges.outbox import Outbox
from segue.worker.edges.peers import Peers
from segue.worker.meter import Meter
from segue.worker.stage import (
    StageRunner,
    Unused,
    Visit,
    as_stage_error,
    end_of,
    engine_id,
    facts_of,
    load_adapter,
    timing,
)

log = logging.getLogger(__name__)

REMEMBER_DROPPED = 4096
"""Number of ids of finished requests to remember, so that their late messages are recognized."""
STATS_EVERY = 0.5
"""Seconds between stats while busy; they are also sent when the worker becomes idle."""


class Worker:
    """The state of a running worker; one thread, one loop."""

    def __init__(self, spec: WorkerSpec, built: Built, peers: Peers) -> None:
        self.name = spec.worker
        self.address = peers.address
        self.orchestrator = spec.orchestrator
        self.stages: dict[str, StageRunner] = built.stages
        self.connectors: dict[tuple[str, str], Connector] = built.inbound
        self.all_connectors = built.connectors
        self.peers = peers
        self.outbox = Outbox(built.channels, built.retained, self._send)
        self.local: deque[ToWorker] = deque()
        """Messages between stages fused into this worker."""
        self.arrivals = Arrivals(built.inbound, peers.wake)
        self.early: dict[str, list[Chunk]] = {}
        """Chunks that overtook their `Begin` or `Moved`."""
        self.dropped: OrderedDict[str, None] = OrderedDict()
        self.replayable = frozenset(spec.replayable)
        self.meter = Meter(self.name, spec.replica, built.stages, built.inbound)
        self.facts = built.facts
        self.shared_bytes = built.shared_bytes
        self.running = True

    def loop(self) -> None:
        self.tell(Ready(self.name, self.facts, self.address))
        while self.running:
            busy = bool(self.local) or any(stage.engine.has_work() for stage in self.stages.values())
            if not busy and self.meter.changed():
                self.report()
            self.turn(self.peers.receive(wait=not busy))
        self.outbox.close()
        for connector in self.all_connectors:
            connector.close()

    def turn(self, received: Iterable[bytes]) -> None:
        """Handle messages, then let each engine that has work take one step."""
        for data in received:
            self.handle(decode_for_worker(data))
        while self.local:
            self.handle(self.local.popleft())
        for address, reachable in self.peers.changes():
            self.on_link(address, reachable=reachable)
        for chunk, found in self.arrivals.poll():
            self.on_landed(chunk, found)
        for stage in self.stages.values():
            if stage.engine.has_work():
                self.step(stage)
        if self.outbox.waiting():
            self.outbox.pump()
            self.unpause()
        if self.meter.due(STATS_EVERY):
            self.report()

    # ── one step ───────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, stage: StageRunner) -> None:
        start = time.monotonic()
        outputs = stage.engine.step()
        self.meter.stepped(stage.plan.name, time.monotonic() - start, len(outputs))
        emissions: list[Emission] = []
        leaving: list[tuple[Visit, StageOutput]] = []
        for output in outputs:
            visit = stage.visits.get(output.request_id)
            if visit is None:
                continue
            if output.error is not None:
                self.fail(stage, visit, output.error)
                continue
            if not visit.first:
                visit.first = time.monotonic()
                self.meter.queued(stage.plan.name, visit.first - visit.began)
            try:
                emission = stage.emission(visit, output)
            except Exception as error:
                self.fail_by_model_code(stage, visit, error)
                continue
            leaving.append((visit, output))
            if emission is not None:
                emissions.append(emission)
        # before downstream stages get the output, so that the client receives their results after it
        if emissions:
            self.tell(Progress(self.name, emissions))
        for visit, output in leaving:
            if output.request_id in stage.visits:
                try:
                    self.hand_on(stage, visit, output)
                except Exception as error:
                    self.fail_by_model_code(stage, visit, error)
        for visit in stage.visits.values():
            if visit.unused:
                self.acknowledge(stage, visit)
        for output in outputs:
            if output.finished and output.error is None and (visit := stage.visits.get(output.request_id)):
                visit.ends.append(end_of(output))
                if len(visit.ends) == visit.request.outputs:
                    self.finish(stage, visit)
            elif output.turn_ended and (visit := stage.visits.get(output.request_id)) and visit.begin.holds:
                visit.downstreams, visit.between = [], True
                self.next_visit(stage, visit)

    def fail_by_model_code(self, stage: StageRunner, visit: Visit, error: Exception) -> None:
        """The family's code raised an exception (payloads, transfers): fail the request, and keep the worker."""
        stage.engine.cancel(visit.request.request_id)
        self.fail(stage, visit, as_stage_error(error, stage.plan.name))

    def hand_on(self, stage: StageRunner, visit: Visit, output: StageOutput) -> None:
        """Apply each edge's transfer; a final output closes the edge's stream even without a payload."""
        final = output.finished or (output.turn_ended and visit.begin.holds)
        if visit.begin.facts:
            visit.facts |= facts_of(output.payload)
        for peer in visit.downstreams:
            if own_name(peer.stage) == OUTPUT:
                payload = file_parts(visit.request, output, visit.made)
            else:
                payload = stage.transfers[stage_of(peer.stage)](visit.request, output)
            if payload is not None or final:
                self.outbox.push(visit.request_id, visit.begin.stage, peer.stage, payload, final=final)
        if not output.finished:
            self.throttle(stage, visit)

    def finish(self, stage: StageRunner, visit: Visit) -> None:
        self.leave(stage, visit)
        now = time.monotonic()
        self.tell(
            StageDone(
                self.name,
                visit.request_id,
                visit.begin.stage,
                visit.begin.attempt,
                sorted(visit.ends, key=lambda end: end.index),
                now - visit.began,
                now - (visit.started or visit.began),
                now - (visit.first or visit.began),
                visit.facts,
            )
        )

    def fail(self, stage: StageRunner, visit: Visit, error: SegueError) -> None:
        self.meter.failed(stage.plan.name)
        self.leave(stage, visit)
        self.tell_failed(visit.begin, error)

    def leave(self, stage: StageRunner, visit: Visit) -> None:
        """Remove a request that the engine is done with; its upstreams may free the payloads that they kept for it."""
        del stage.visits[visit.request.request_id]
        visit.release()
        self.arrivals.drop(visit.request_id, visit.begin.stage)
        for peer in visit.upstreams.values():
            last = visit.next_seq[peer.stage] - 1
            self._send(peer.address, Consumed(visit.request_id, peer.stage, visit.self_peer, last, finished=True))

    def unpause(self) -> None:
        for stage in self.stages.values():
            for visit in stage.visits.values():
                if visit.paused:
                    self.throttle(stage, visit)

    def throttle(self, stage: StageRunner, visit: Visit) -> None:
        """Let the engine go on with a request only while all that receive its output have room, the client as well."""
        full = visit.client_behind or self.outbox.blocked(visit.request_id, visit.begin.stage)
        if full and not visit.paused:
            stage.engine.pause(visit.request.request_id)
        elif visit.paused and not full:
            stage.engine.resume(visit.request.request_id)
        visit.paused = full

    # ── messages ───────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, message: ToWorker) -> None:
        match message:
            case Chunk():
                self.on_chunk(message)
            case Consumed():
                self.outbox.consumed(
                    message.request_id, message.source, message.target, message.seq, finished=message.finished
                )
                self.unpause()
            case Begin():
                self.on_begin(message)
            case Return():
                self.on_return(message)
            case Close():
                self.on_close(message)
            case Forgo():
                self.outbox.forgo(message.request_id, message.source, message.target)
            case Append():
                self.on_append(message)
            case Throttle():
                self.on_throttle(message)
            case Abandon():
                self.on_abandon(message)
            case Drop():
                self.on_drop(message.request_id)
            case Resend():
                if not self.outbox.resend(message.request_id, message.source, message.target):
                    self.tell_lost(message.request_id, message.target.stage, message.target.attempt, message.source)
            case Moved():
                self.on_moved(message)
            case PeerLost():
                self.peers.forget(message.address)
            case LoadAdapter():
                self.tell(load_adapter(self.name, self.stages[message.stage], message))
            case UnloadAdapter():
                if (lora := self.stages[message.stage].lora) is not None:
                    lora.unload(message.name)
            case Ping():
                self.report()
            case Shutdown():
                self.running = False

    def on_begin(self, begin: Begin) -> None:
        request_id = begin.request.request_id
        if request_id in self.dropped:  # late messages of the old request would be mistaken for its own
            said = f"a request with id {request_id!r} was served before; give each request its own id"
            self.tell_failed(begin, InvalidRequest(said, field="request_id"))
            return
        stage = self.stages[stage_of(begin.stage)]
        known = engine_id(request_id, begin.stage)
        if old := stage.visits.get(known):  # an earlier attempt in this very worker
            self.discard(stage, known, old)
        self_peer = Peer(begin.stage, self.name, self.address, begin.attempt)
        for target in begin.downstreams:
            self.outbox.open(request_id, self_peer, target)
        try:
            stage.begin(begin, self_peer)
        except Exception as error:
            # stage models parse the client's input, which may raise anything: only this request fails
            self.meter.failed(stage.plan.name)
            self.tell_failed(begin, as_stage_error(error, stage.plan.name))
            return
        self.take_early(request_id)

    def discard(self, stage: StageRunner, known: str, visit: Visit) -> None:
        """Remove a visit that the engine is not done with. `known`: its id in the engine."""
        stage.engine.cancel(known)
        del stage.visits[known]
        visit.release()
        self.arrivals.drop(visit.request_id, visit.begin.stage)

    def on_abandon(self, message: Abandon) -> None:
        """Free what a request has in a stage that goes on in another worker. Its id is not dropped: it may return."""
        stage, known = self.stages[stage_of(message.stage)], engine_id(message.request_id, message.stage)
        visit = stage.visits.get(known)
        if visit is not None and visit.begin.attempt <= message.attempt:
            self.discard(stage, known, visit)
            if is_input(message.stage):  # as in on_drop
                self.tell_failed(visit.begin, Cancelled("it goes on elsewhere"))
        self.outbox.abandon(message.request_id, message.stage, message.attempt)
        self.meter.touch()

    def on_link(self, address: str, *, reachable: bool) -> None:
        """Report that a peer on another host can be reached again, or no more."""
        if address != self.orchestrator:
            self.tell((Reachable if reachable else Unreachable)(self.name, address))
        elif not reachable:
            # reports may be lost, and with them the end of a request: a new incarnation starts from the journal
            log.error("the connection to the server, or a message, was lost; this worker ends, to be started again")
            self.running = False

    def on_return(self, message: Return) -> None:
        """Let a request visit a stage again, whose sequence holds; after the visits before, if they are not over."""
        stage = self.stages[message.stage]
        visit = stage.visit(message.request_id, message.stage)
        if visit is None or visit.begin.attempt != message.attempt:
            return
        for target in message.downstreams:
            self.outbox.open(message.request_id, visit.self_peer, target)
        visit.returns.append(message)
        self.next_visit(stage, visit)

    def on_close(self, message: Close) -> None:
        stage = self.stages[message.stage]
        visit = stage.visit(message.request_id, message.stage)
        if visit is not None and visit.begin.attempt == message.attempt:
            visit.closed = True
            self.next_visit(stage, visit)

    def next_visit(self, stage: StageRunner, visit: Visit) -> None:
        """Begin the next visit of a sequence that holds, or end it if there is none."""
        if not visit.between:
            return
        if visit.returns:
            coming = visit.returns.popleft()
            visit.between, visit.downstreams = False, coming.downstreams
            visit.request.kept.clear()
            visit.receive(coming.upstreams)
            self.take_early(visit.request_id)
        elif visit.closed:
            assert isinstance(stage.engine, Holds)
            visit.between = False
            stage.engine.close(visit.request.request_id)

    def on_append(self, message: Append) -> None:
        """Feed what the client appended to the input stage."""
        stage = self.stages[message.stage]
        visit = stage.visits.get(message.request_id)
        if visit is None or visit.begin.attempt != message.attempt:
            return
        try:
            stage.engine.feed(message.request_id, CLIENT, {"piece": message.piece}, final=message.piece is None)
        except Exception as error:
            # see on_begin
            self.fail_by_model_code(stage, visit, error)

    def on_throttle(self, message: Throttle) -> None:
        stage = self.stages[stage_of(message.stage)]
        visit = stage.visit(message.request_id, message.stage)
        if visit is not None and visit.begin.attempt == message.attempt:
            visit.client_behind = message.behind
            self.throttle(stage, visit)

    def acknowledge(self, stage: StageRunner, visit: Visit) -> None:
        """Tell the upstreams which chunks have been used, which frees their edges' budgets."""
        used: dict[str, int] = {}
        for _ in range(len(visit.unused) - stage.engine.backlog(visit.request.request_id)):
            chunk = visit.unused.popleft()
            if chunk.source:
                used[chunk.source] = chunk.seq
            chunk.release(visit.request_id)
        for source, seq in used.items():
            peer = visit.upstreams[source]
            self._send(peer.address, Consumed(visit.request_id, source, visit.self_peer, seq))

    def on_drop(self, request_id: str) -> None:
        for name, stage in self.stages.items():
            ended = [known for known, visit in stage.visits.items() if visit.request_id == request_id]
            for known in dict.fromkeys([request_id, *ended]):
                stage.engine.cancel(known)  # a stage that is done may lend something to one that is not
                visit = stage.visits.pop(known, None)
                if visit is None:
                    continue
                self.arrivals.drop(request_id, visit.begin.stage)
                if is_input(name):  # the orchestrator waits until the input stage is done with each request
                    self.tell_failed(visit.begin, Cancelled("it was dropped"))
        self.outbox.drop(request_id)
        for connector in self.all_connectors:
            connector.release(request_id)
        self.early.pop(request_id, None)
        self.meter.touch()  # report the freed memory
        self.dropped[request_id] = None
        while len(self.dropped) > REMEMBER_DROPPED:
            self.dropped.popitem(last=False)

    def on_moved(self, moved: Moved) -> None:
        visit = self.stages[stage_of(moved.target)].visit(moved.request_id, moved.target)
        if visit is not None:
            self.arrivals.drop(moved.request_id, moved.target, moved.source.stage)
            visit.moved(moved.source)
            self.take_early(moved.request_id)

    def take_early(self, request_id: str) -> None:
        for chunk in self.early.pop(request_id, []):
            self.on_chunk(chunk)

    def on_chunk(self, chunk: Chunk) -> None:
        if chunk.request_id in self.dropped:
            return
        if node_of(chunk.source.address) != self.peers.node:
            chunk.sent = time.monotonic()  # by our clock
        stage = self.stages[stage_of(chunk.target)]
        visit = stage.visit(chunk.request_id, chunk.target)
        when = "early" if visit is None else timing(chunk, visit.begin.attempt, visit.upstreams, visit.next_seq)
        if when == "early":
            self.early.setdefault(chunk.request_id, []).append(chunk)
        if visit is None or when != "now":
            return
        found = self.arrivals.take(chunk)
        if not isinstance(found, Coming):
            self.feed(stage, visit, chunk, found)

    def on_landed(self, chunk: Chunk, found: Arrived | Gone | None) -> None:
        """Feed a chunk whose payload was on its way. Its request may have ended with the chunk before it."""
        stage = self.stages[stage_of(chunk.target)]
        visit = stage.visit(chunk.request_id, chunk.target)
        if visit is None or chunk.seq < visit.next_seq[chunk.source.stage]:
            self.arrivals.refuse(chunk)
        else:
            self.feed(stage, visit, chunk, found)

    def feed(self, stage: StageRunner, visit: Visit, chunk: Chunk, found: Arrived | Gone | None) -> None:
        """Pass a chunk to the engine, once. `found`: its payload, if it has one."""
        source = chunk.source.stage
        edge = (stage_of(source), stage_of(chunk.target))
        payload, unused = {}, Unused(source, chunk.seq, None)
        gap = chunk.seq > visit.next_seq[source]  # the chunks before it were lost with a connection
        if isinstance(found, Gone) or gap:
            self.meter.lost(edge)
            self.arrivals.refuse(chunk)
            # its producer died between sending and our reading; the orchestrator knows which worker it was
            self.tell_lost(chunk.request_id, chunk.target, visit.begin.attempt, source)
            return
        if found is not None:
            assert chunk.meta is not None, "only metadata bring a payload"
            payload = found.payload
            taken = (self.connectors[edge], chunk.meta)
            if own_name(chunk.target) == OUTPUT:  # it keeps nothing of a chunk that it has used
                unused.taken = taken
            else:
                visit.taken.append(taken)
        self.meter.hop(edge, time.monotonic() - chunk.sent, chunk.nbytes)
        visit.next_seq[source] = chunk.seq + 1
        # the output stage tells repetitions by their units: a new attempt may have been given its input in other pieces
        numbered = edge[0] in self.replayable and own_name(chunk.target) != OUTPUT
        known = source in visit.complete or (numbered and chunk.seq < visit.fed.get(source, 0))
        try:
            if not known:
                stage.engine.feed(visit.request.request_id, own_name(source), payload, final=chunk.final)
        except Exception as error:
            # see on_begin
            visit.unused.append(unused)
            self.fail_by_model_code(stage, visit, error)
            return
        visit.started = visit.started or time.monotonic()
        if known:
            unused.release(chunk.request_id)
            self._send(chunk.source.address, Consumed(chunk.request_id, source, visit.self_peer, chunk.seq))
        else:
            visit.unused.append(unused)
            self.acknowledge(stage, visit)
        if chunk.final:
            visit.complete.add(source)
            self.tell(InputDone(self.name, chunk.request_id, chunk.target, visit.begin.attempt, source))
            self.input_ended(stage, visit, source)

    def input_ended(self, stage: StageRunner, visit: Visit, source: str) -> None:
        """Let a sequence that holds draw once all input of this visit is there."""
        if visit.begin.holds and source in visit.awaited:
            visit.awaited.discard(source)
            if not visit.awaited:
                assert isinstance(stage.engine, Holds)
                stage.engine.go_on(visit.request.request_id)

    # ── sending ────────────────────────────────────────────────────────────────────────────────────────────────────

    def report(self) -> None:
        engines = {
            name: {**(stats := stage.engine.stats()), **stage.load(stats)} for name, stage in self.stages.items()
        }
        held: dict[str, float] = {
            "retained_bytes": self.outbox.retained.in_memory,
            "spilled_bytes": self.outbox.retained.spilled,
            "pool_bytes": sum(connector.bytes_in_use for connector in self.all_connectors),
            "early_chunks": sum(map(len, self.early.values())),
            "coming_chunks": self.arrivals.count(),
            "shared_weight_bytes": self.shared_bytes,
        }
        self.tell(self.meter.report(engines, held, self.outbox.edges()))

    def tell(self, message: ToOrchestrator) -> None:
        self.peers.send(self.orchestrator, encode(message))

    def tell_failed(self, begin: Begin, error: SegueError) -> None:
        self.tell(
            Failed(
                self.name,
                begin.request.request_id,
                begin.stage,
                begin.attempt,
                type(error).__name__,
                error.message,
                error.field,
            )
        )

    def tell_lost(self, request_id: str, stage: str, attempt: int, source: str) -> None:
        self.tell(InputLost(self.name, request_id, stage, attempt, source))

    def _send(self, address: str, message: ToWorker) -> None:
        if address == self.address:
            self.local.append(message)
        else:
            self.peers.send(address, encode(message))
