"""The whole protocol of recovery without processes: the real orchestrator, supervisor and workers, joined by queues.

The engines are the smallest that keep the contract; everything that decides about attempts, chunks and placement is the
product's own code. Every event is chosen by the caller: which message arrives next, which worker takes a step, what
dies and which link is lost. `key` tells states apart.

    input ─▶ count (draws numbers, journalled) ─▶ tone (a sample per number, to the client)
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch

from segue.connectors.base import Arrived, Fetched, Payload, Reach
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import StageRequest
from segue.graph.deployment.deployment import Hardware, Plan
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import INPUT, StageGraph
from segue.messages.addresses import Network, joined, node_of
from segue.messages.deltas import AudioDelta, Delta, Finished
from segue.messages.errors import SegueError
from segue.messages.process import ModelSource, WorkerSpec
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.messages.wire import (
    Chunk,
    Ready,
    StageDone,
    Stats,
    ToWorker,
    decode_for_orchestrator,
    decode_for_worker,
    encode,
)
from segue.orchestrator.orchestrator import Orchestrator
from segue.orchestrator.requests.client_queue import ClientQueue
from segue.orchestrator.workers.placement import Host, Placement
from segue.orchestrator.workers.supervisor import Supervisor
from segue.worker.build import Built
from segue.worker.edges.outbox import Channel
from segue.worker.edges.retained import RetainedStore
from segue.worker.stage import StageRunner
from segue.worker.worker import Worker

COUNT, TONE = "count", "tone"
EDGES = ((INPUT, COUNT), (COUNT, TONE))
ORCHESTRATOR = ""
"""Its address here."""
NUMBERS = 2
"""That `count` draws for a request."""
Event = tuple[str, ...]


def plan_of(nodes: dict[str, list[str]]) -> Plan:
    """`nodes`: stage → the node of each of its replicas."""
    graph = StageGraph("chain")
    graph.stage(COUNT, "autoregressive", takes={"text"})
    graph.stage(TONE, "module", gives={"audio"})
    graph.edge(COUNT, TONE)
    stages = {name: {"node": where, "replicas": len(where)} for name, where in nodes.items()}
    return load_plan(graph, {"stages": {INPUT: {"replicas": 1}, **stages}}, hardware=Hardware(2, 1 << 34))


class Within:
    """A connector whose payloads are in the messages."""

    reach: Reach = "network"
    bytes_in_use = 0

    def put(self, source: str, target: str, request_id: str, payload: Payload) -> tuple[bool, int, dict[str, Any]]:
        return True, 8, {"payload": payload}

    def fetch(
        self, source: str, target: str, request_id: str, metadata: dict[str, Any] | None, wake: Callable[[], None]
    ) -> Fetched:
        assert metadata is not None
        return Arrived(metadata["payload"], 8)

    def release(self, request_id: str, metadata: dict[str, Any] | None = None) -> None: ...

    def close(self) -> None: ...


@dataclass
class Numbers:
    """One request in an engine: what it has still to give out."""

    left: list[list[int]]
    given: int = 0
    fed: int = 0
    ready: bool = False
    closed: bool = False
    """Nothing is added to `left`."""


class Toy:
    """The engine of all three stages: gives out lists of numbers, one a step."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.held: dict[str, Numbers] = {}

    def add(self, request: StageRequest) -> None:
        if self.stage == INPUT:
            numbers = Numbers([[0]], ready=True, closed=True)
        elif self.stage == COUNT:
            done = [int(unit) for unit in request.resume]  # type: ignore[arg-type]
            numbers = Numbers([*filter(None, [done]), *([n] for n in range(len(done), NUMBERS))], closed=True)
        else:
            numbers = Numbers([], ready=True)
        self.held[request.request_id] = numbers

    def feed(self, request_id: str, upstream: str, payload: Payload, *, final: bool) -> None:
        if (numbers := self.held.get(request_id)) is None:
            return
        if self.stage == TONE:
            start, new = payload.get("start", 0), payload.get("numbers", [])
            numbers.left.append(new[max(0, numbers.fed - start) :])  # a new attempt may cut elsewhere
            numbers.fed = max(numbers.fed, start + len(new))
            numbers.closed = final
        numbers.ready = True

    def cancel(self, request_id: str) -> None:
        self.held.pop(request_id, None)

    def pause(self, request_id: str) -> None: ...

    def resume(self, request_id: str) -> None: ...

    def warm_up(self) -> None: ...

    def backlog(self, request_id: str) -> int:
        return len(self.held[request_id].left) if self.stage == TONE and request_id in self.held else 0

    def has_work(self) -> bool:
        return any(one.ready and one.left for one in self.held.values())

    def stats(self) -> dict[str, float]:
        return {}

    def step(self) -> list[TokenOutput]:
        outputs = []
        for request_id, one in list(self.held.items()):
            if one.ready and one.left:
                numbers, last = one.left.pop(0), one.closed and not one.left
                output = TokenOutput(request_id, finished=last, finish_reason="stop" if last else "")
                if self.stage == COUNT:
                    output.token_ids, output.first_index = numbers, one.given
                elif self.stage == TONE and numbers:
                    output.payload = {"samples": torch.tensor(numbers, dtype=torch.float32), "sample_rate": 8000}
                one.given += len(numbers)
                outputs.append(output)
                if last:
                    del self.held[request_id]
        return outputs


def numbers_of(request: StageRequest, output: TokenOutput) -> Payload:
    """The transfer of both edges."""
    return {"start": output.first_index, "numbers": output.token_ids}


class Heard(ClientQueue):
    """What the client gets."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.samples: list[int] = []
        self.end: Finished | SegueError | None = None

    def put(self, item: Delta | SegueError) -> bool:
        assert self.end is None, f"{item} comes after the end"
        if isinstance(item, AudioDelta):
            self.samples += [int(sample) for sample in memoryview(item.samples).cast("B").cast("f")]
        elif isinstance(item, Finished | SegueError):
            self.end = item
        return False


class Peers:
    """The sockets of a worker."""

    def __init__(self, world: World, address: str) -> None:
        self._world = world
        self.address = address
        self.node = node_of(address)
        self.reached: dict[str, bool] = {}
        """Peers on other nodes that it has written to → whether it believes that they are reachable."""
        self.news: list[tuple[str, bool]] = []
        self._dead: set[str] = set()

    def send(self, address: str, data: bytes) -> None:
        if address in self._dead:
            return
        if address != ORCHESTRATOR and node_of(address) != self.node:
            self.reached.setdefault(address, True)
        self._world.post(self.address, address, data)

    def forget(self, address: str) -> None:
        self._dead.add(address)
        self.reached.pop(address, None)
        self.news = [one for one in self.news if one[0] != address]
        self._world.queues.pop((self.address, address), None)

    def changes(self) -> list[tuple[str, bool]]:
        news, self.news = self.news, []
        return news

    def wake(self) -> None: ...


class Places:
    """`Placement` of workers that the world starts."""

    runtime_dir = no_kernels = ""

    def __init__(self) -> None:
        self.specs: dict[str, WorkerSpec] = {}

    def host(self, node: str) -> Host:
        return Host(f"/{node}", Network(node, node, b"", b"", b""))

    def spawn(self, spec: WorkerSpec, node: str) -> None:
        self.specs[spec.worker] = spec

    def may_have(self, node: str) -> bool:
        return True

    def need(self, nodes: Set[str]) -> None: ...

    def kill(self, pid: int, node: str) -> None: ...

    async def start(self) -> None: ...

    async def restart(self) -> None: ...

    async def close(self) -> None: ...


@dataclass
class World:
    plan: Plan
    queues: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)
    """(sender, receiver) → what is on its way."""
    workers: dict[str, Worker] = field(default_factory=dict)
    """By address."""
    dead: list[str] = field(default_factory=list)
    """Names of workers whose death has not been noticed."""
    cut: tuple[str, str] | None = None
    """Nodes that do not reach each other."""

    def __post_init__(self) -> None:
        places = self.places = Places()
        world = self

        class Wired(Supervisor):
            def make_placement(self, preload: list[str], listen: object) -> Placement:
                world.exited = self._on_exit
                return places

            def send(self, address: str, message: ToWorker) -> None:
                world.post(ORCHESTRATOR, address, encode(message))

        source = ModelSource("chain", "/model")
        self.orchestrator = Orchestrator(self.plan, sources={"": source}, preload=[], supervise=Wired)
        for replica in self.orchestrator.replicas.all:
            self.orchestrator.supervisor.spawn(replica)
        for worker in list(places.specs):
            self.do(("start", worker))
        for sender, receiver in list(self.queues):
            while (sender, receiver) in self.queues:
                self.do(("deliver", sender, receiver))
        self.client = Heard()
        self.state = self.orchestrator.admit(Request(request_id="r", prompt="", modalities=["audio"], seed=1))
        self.state.queue = self.client

    exited: Callable[[str, str], None] = field(init=False)

    def post(self, sender: str, receiver: str, data: bytes) -> None:
        if receiver == ORCHESTRATOR:
            said = decode_for_orchestrator(data)
            if isinstance(said, Stats):
                return
            if isinstance(said, StageDone):
                data = encode(msgspec.structs.replace(said, began=0.0, started=0.0, first=0.0))
        elif receiver not in self.workers:
            return  # dead
        else:
            message = decode_for_worker(data)
            if isinstance(message, Chunk):
                data = encode(msgspec.structs.replace(message, sent=0.0))
        self.queues.setdefault((sender, receiver), []).append(data)

    # ── events ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def events(self) -> list[Event]:
        """Return what can happen next, faults apart."""
        found: list[Event] = [
            ("deliver", *ends) for ends, queue in sorted(self.queues.items()) if queue and not self._across(*ends)
        ]
        found += [("step", at) for at, one in sorted(self.workers.items()) if self._has_work(one)]
        found += [("notice", at) for at, one in sorted(self.workers.items()) if one.peers.news]  # type: ignore[attr-defined]
        found += [("bury", worker) for worker in self.dead]
        found += [("start", worker) for worker in sorted(self.places.specs)]
        if self.cut is not None:
            found.append(("mend",))
        return found

    def do(self, event: Event) -> None:
        match event:
            case ("deliver", sender, receiver):
                data = self.queues[sender, receiver].pop(0)
                if not self.queues[sender, receiver]:
                    del self.queues[sender, receiver]
                if receiver == ORCHESTRATOR:
                    self.orchestrator.supervisor.receive(decode_for_orchestrator(data))
                else:
                    self.workers[receiver].handle(decode_for_worker(data))
                    self._run_local(self.workers[receiver])
            case ("step", at) | ("notice", at):
                self.workers[at].turn([])
            case ("start", worker):
                self._start(self.places.specs.pop(worker))
            case ("kill", at, "lost" | "sent" as fate):
                self._kill(at, fate)
            case ("bury", worker):
                self.dead.remove(worker)
                self.exited(worker, "killed")
            case ("cut", one, other):
                self.cut = (one, other)
                for ends in [ends for ends in self.queues if self._across(*ends)]:
                    del self.queues[ends]
                self._notice(lambda here, there: {here, there} == {one, other}, reachable=False)
            case ("mend",):
                ends, self.cut = set(self.cut or ()), None
                self._notice(lambda here, there: {here, there} == ends, reachable=True)

    def _start(self, spec: WorkerSpec) -> None:
        assert spec.network is not None
        peers = Peers(self, joined(spec.network, spec.inbox, f"tcp://{spec.worker}"))
        connector = Within()
        plans = {spec.worker.split(".")[0]: self.plan.stages[spec.worker.split(".")[0]]}
        transfers = {target: numbers_of for _, target in EDGES}
        runners = {name: StageRunner(one, Toy(name), transfers, SamplingParams()) for name, one in plans.items()}
        built = Built(
            runners,
            {edge: Channel(connector, None, 1 << 20, retain=True) for edge in EDGES if edge[0] in plans},
            {edge: connector for edge in EDGES if edge[1] in plans},
            [connector],
            RetainedStore(1 << 20, "/nowhere"),
            {},
        )
        worker = Worker(spec, built, peers)  # type: ignore[arg-type]
        self.workers[peers.address] = worker
        worker.tell(Ready(worker.name, {}, worker.address))

    def _kill(self, at: str, fate: Literal["lost", "sent"]) -> None:
        """`lost`: what it has sent and nobody has received goes with it."""
        worker = self.workers.pop(at)
        self.dead.append(worker.name)
        for ends in [ends for ends in self.queues if ends[1] == at or (ends[0] == at and fate == "lost")]:
            del self.queues[ends]
        for other in self.workers.values():
            peers: Any = other.peers
            if peers.reached.get(at):
                peers.reached[at] = False
                peers.news.append((at, False))

    def _notice(self, lost: Callable[[str, str], bool], *, reachable: bool) -> None:
        for worker in self.workers.values():
            peers: Any = worker.peers
            for address, was in peers.reached.items():
                if was != reachable and lost(peers.node, node_of(address)) and address in self.workers:
                    peers.reached[address] = reachable
                    peers.news.append((address, reachable))

    def _across(self, sender: str, receiver: str) -> bool:
        """Whether a message between workers waits for the link."""
        ends = {node_of(sender), node_of(receiver)}
        return self.cut is not None and ORCHESTRATOR not in (sender, receiver) and ends == set(self.cut)

    @staticmethod
    def _has_work(worker: Worker) -> bool:
        return any(stage.engine.has_work() for stage in worker.stages.values())

    @staticmethod
    def _run_local(worker: Worker) -> None:
        while worker.local:
            worker.handle(worker.local.popleft())

    # ── states ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def key(self) -> str:
        """Return all that decides what can happen."""
        state, alive = self.state, sorted(self.workers.items())
        workers = [
            (
                at,
                [
                    (
                        v.begin.stage,
                        v.begin.attempt,
                        v.next_seq,
                        v.upstreams,
                        v.fed,
                        v.complete,
                        repr(stage.engine.held),
                    )  # type: ignore[attr-defined]
                    for stage in one.stages.values()
                    for v in stage.visits.values()
                ],
                [
                    (key, f.source, f.target, f.next_seq, len(f.pending), f.unconsumed)
                    for key, f in one.outbox._flows.items()
                ],
                one.early,
                list(one.dropped),
                one.peers.reached,  # type: ignore[attr-defined]
                one.peers.news,  # type: ignore[attr-defined]
            )
            for at, one in alive
        ]
        links = self.orchestrator._router.links.names()
        replicas = [(r.worker, r.state, r.buried) for r in self.orchestrator.replicas.all]
        stages = [
            (name, one.worker, one.attempt, one.done, sorted(one.inputs_done)) for name, one in state.stages.items()
        ]
        mine = (stages, sorted(state.waiting), state.journal, sorted(state.losses.items()), sorted(state.blamed))
        return repr(
            (
                workers,
                sorted(self.queues.items()),
                mine,
                links,
                replicas,
                sorted(self.dead),
                self.cut,
                sorted(self.places.specs),
                self.client.samples,
                type(self.client.end),
            )
        )
