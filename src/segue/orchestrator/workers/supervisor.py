"""The supervisor starts a plan's workers, kills those that hang and replaces those that die.

It knows of requests only which worker has some. When a worker dies, it notifies its owner, which recovers the requests;
both read the state of the replicas (`segue.orchestrator.workers.replicas`)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from segue.graph.deployment.deployment import Plan
from segue.graph.deployment.stage_plan import CPU
from segue.graph.kinds.registry import kind_of, shares_weights
from segue.graph.machine.hosts import stages_on
from segue.graph.parts import is_built_in, member_of
from segue.messages.addresses import SERVER, Network, joined, port_of, protect
from segue.messages.connection import InOrder
from segue.messages.errors import ConfigError, SegueError, ShuttingDown, StageLost
from segue.messages.join import BEAT_SECONDS, Listen, Welcome
from segue.messages.process import ModelSource, WorkerSpec
from segue.messages.wire import (
    AdapterLoaded,
    Loading,
    PeerLost,
    Ping,
    Ready,
    Shutdown,
    StartFailed,
    Stats,
    ToOrchestrator,
    ToWorker,
    decode_for_orchestrator,
    encode,
)
from segue.orchestrator.workers.hangs import HangWatch
from segue.orchestrator.workers.lora_adapters import Adapters
from segue.orchestrator.workers.nodes.node_placement import NodePlacement
from segue.orchestrator.workers.nodes.ray_agents import RayAgents
from segue.orchestrator.workers.outgoing import Outgoing
from segue.orchestrator.workers.placement import LocalPlacement, Placement
from segue.orchestrator.workers.replicas import Replica, Replicas
from segue.orchestrator.workers.scaling.moves import Moves

log = logging.getLogger(__name__)

GIVE_UP_AFTER = 3
"""Number of successive deaths before ready after which a replica is given up."""

SAID_WHY_WITHIN = 60.0
"""Seconds to wait for the error of a worker after it ended while starting."""

_MOST_AT_ONCE = 64
"""Messages that are handled before others of the event loop go on."""

OnProgress = Callable[[str, float, str], None]
"""Called with (worker, fraction loaded, what is being loaded)."""


class Owner(Protocol):
    """The owner of the requests, which the supervisor notifies."""

    def receive(self, message: ToOrchestrator) -> None:
        """Handle a worker's message about a request."""

    def worker_ready(self) -> None:
        """Handle a new ready worker."""

    def worker_lost(self, what: str, *, planned: bool = False) -> None:
        """Handle the loss of workers; `what` names the stage, or the cause. `planned`: it was ended on purpose."""

    def broken(self, error: BaseException) -> None:
        """Handle a failure after which no worker can be expected to answer."""


class Supervisor:
    """Supervises the workers of a plan: `start` once, `close` at the end."""

    def __init__(
        self,
        plan: Plan,
        owner: Owner,
        *,
        sources: Mapping[str, ModelSource],
        preload: list[str],
        load_format: str,
        on_progress: OnProgress | None,
        listen: Listen | None = None,
    ) -> None:
        """`listen`: where hosts join. Raises `ConfigError` if the plan needs others and it is None."""
        self._plan = plan
        self._owner = owner
        self._sources = sources
        self._load_format = load_format
        self._on_progress = on_progress or (lambda worker, fraction, what: None)
        self.replicas = Replicas(plan.groups, plan.stages)
        self.adapters = Adapters(plan, self.replicas, self.send)
        self.stats: dict[str, Stats] = {}
        """Worker incarnation → its latest stats."""
        self.moves = Moves(plan, self.replicas, self.stats, self)
        self.stopping = False
        """Set while stopping: a worker that dies now is not replaced."""
        self._placement = self.make_placement(preload, listen)
        self._context: zmq.Context[Any] | None = None  # None until started
        self._out: Outgoing | None = None
        self._received: dict[str, InOrder] = {}
        """Worker on another host → the messages of this incarnation."""
        self._inbox: zmq.asyncio.Socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._started: asyncio.Future[None] | None = None
        self._local = self._remote = self._address = ""
        """The inbox's endpoints, and its address."""
        self._network: Network | None = None

    def make_placement(self, preload: list[str], listen: Listen | None) -> Placement:
        """Make what starts the workers: on this host, or also on those that join. Raises `ConfigError`."""
        gpus = any(device != CPU for stage in self._plan.stages.values() for device in stage.devices)
        local = LocalPlacement(
            preload,
            gpus=gpus,
            on_spawned=self._on_spawned,
            on_exit=self._on_exit,
            on_lost=self._on_placement_lost,
        )
        if any(edge.kind.startswith("mooncake") for edge in self._plan.edges):
            log.warning(
                "Mooncake's clients listen on every interface, on ports of their choice, and ask nobody for a secret: "
                "join the hosts by a network that nobody else reaches"
            )
        if listen is None:
            network = [edge for edge in self._plan.edges if edge.kind == "tcp"]
            if self._plan.nodes() or network:
                what = (
                    f"nodes ({', '.join(self._plan.nodes())})" if self._plan.nodes() else "an edge with a TcpConnector"
                )
                raise ConfigError(
                    f"the deployment has {what}, but the server listens for no other host: start it with --listen",
                    field="listen",
                )
            return local
        return NodePlacement(
            local,
            listen,
            self._plan.nodes(),
            Welcome(0, preload, gpus),
            agents=None if self._plan.ray is None else RayAgents(self._plan.ray, listen, self._nodes()),
            check=partial(stages_on, self._plan),
            on_spawned=self._on_spawned,
            on_exit=self._on_exit,
            on_node=self._on_node,
            on_node_lost=self._on_node_lost,
        )

    @property
    def runtime_dir(self) -> str:
        """The directory of this system's sockets; deleted when the system stops."""
        return self._placement.runtime_dir

    @property
    def starting(self) -> bool:
        """Whether `start` runs: workers may wait for their hosts."""
        return self._started is not None and not self._started.done()

    async def start(self) -> None:
        """Return when every stage has a ready replica; raise the first worker's own error otherwise."""
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))  # one per worker; by default 1,023
        await self._open()
        if self._placement.no_kernels and any(
            "cpu" in stage.devices for name, stage in self._plan.stages.items() if not is_built_in(name)
        ):
            log.warning(
                "no compiled kernels for the CPU: %s. torch's operators are used instead, which are slower",
                self._placement.no_kernels,
            )
        await self._started
        self.moves.start()

    async def _open(self) -> None:
        """Start the fork server, bind the inbox, spawn every replica."""
        await self._placement.start()
        assert self._context is not None, "made by `start`"
        self._inbox = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        self._inbox.set_hwm(0)
        host = self._placement.host(SERVER)
        assert host is not None, "this host is always there"
        self._network = host.network
        self._out = Outgoing(self._context, self._network)
        if self._network is not None:
            protect(self._inbox, self._network.public, self._network.secret, listens=True)
            self._inbox.bind(f"tcp://{self._network.host}:*")
            self._remote = f"tcp://{self._network.host}:{port_of(self._inbox)}"
        self._listen_here()
        self._spawn_task(self._read(self._inbox))
        for replica in self.replicas.all:
            self.spawn(replica)
        self._watch_over(HangWatch(self._plan.limits.hang_seconds, time.monotonic()))
        if self._network is not None:
            self._watch_links()

    def _listen_here(self) -> None:
        """Bind the inbox in the placement's directory."""
        assert self._inbox is not None, "made by `_open`"
        self._local = f"ipc://{self._placement.runtime_dir}/orchestrator"
        self._inbox.bind(self._local)
        self._address = self._local if self._network is None else joined(self._network, self._local, self._remote)

    async def close(self) -> None:
        """End every process."""
        self.stopping = True
        self.adapters.close(ShuttingDown("the server is shutting down"))
        self.moves.stop()
        for timer in filter(None, (self._watch, self._look)):
            timer.cancel()
        for replica in self.replicas.all:
            if replica.alive:
                self.send(replica.address, Shutdown())
            replica.state, replica.leaving = "draining", False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._placement.close()
        self._close_sockets()
        if self._context is not None:
            self._context.term()

    # ── sockets ────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, address: str, message: ToWorker) -> None:
        assert self._out is not None, "there are workers only after the start"
        self._out.send(address, encode(message))

    async def _read(self, inbox: zmq.asyncio.Socket) -> None:
        """Handle messages as they come. Those that wait are read without a future for each, which takes longer than
        handling most of them."""
        waiting: zmq.Socket[bytes] = zmq.Socket.shadow(inbox)
        while True:
            self._arrived(await inbox.recv_multipart())
            for _ in range(_MOST_AT_ONCE):
                try:
                    parts = waiting.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._arrived(parts)
            else:
                await asyncio.sleep(0)  # let clients and timers go on, however many messages come

    def _arrived(self, parts: list[bytes]) -> None:
        *head, data = parts
        if not head or self._follows(*head):
            self.receive(decode_for_orchestrator(data))

    def _follows(self, number: bytes, name: bytes) -> bool:
        """Whether a message of a worker on another host follows its last one; if not, the worker is cut off."""
        worker = name.decode()
        if self._received.setdefault(worker, InOrder()).follows(number):
            return True
        self._cut_off(worker)
        return False

    def receive(self, message: ToOrchestrator) -> None:
        """Handle a worker's message."""
        match message:
            case Stats():
                self._on_stats(message)
            case Loading():
                self._on_loading(message)
            case Ready():
                self._on_ready(message)
            case StartFailed():
                self._on_start_failed(message)
            case AdapterLoaded():
                self.adapters.loaded(message)
            case _:
                self._owner.receive(message)

    def _close_sockets(self) -> None:
        if self._out is not None:
            self._out.close()
        if self._inbox is not None:
            self._inbox.close(linger=0)

    # ── starting ───────────────────────────────────────────────────────────────────────────────────────────────────

    def spawn(self, replica: Replica) -> None:
        """Start the next incarnation of a worker; when its node joins, if that is not there."""
        host = self._placement.host(replica.node)
        if host is None:
            replica.state, replica.pid, replica.what = "failed", None, f"waiting for node {replica.node!r}"
            return
        current = {other.worker for other in self.replicas.all}  # the one that died included: its last words may come
        self._received = {worker: numbers for worker, numbers in self._received.items() if worker in current}
        replica.incarnation, replica.buried = replica.incarnation + 1, False
        replica.state = "starting" if replica.incarnation == 1 else "restarting"
        replica.pid, replica.loading, replica.what, replica.pinged = None, 0.0, "forking", None
        replica.address = ""  # nobody writes to it before it is ready
        mine = set(replica.group)
        stages = self._plan.stages if host.hardware is None else stages_on(self._plan, replica.node, host.hardware)
        source = self._sources[member_of(replica.group[0])]
        first = self._plan.stages[replica.group[0]]
        more = self._plan.moves is not None or first.scaling is not None  # may come
        here = first.place_of(replica.index)
        places = [first.place_of(other.index) for other in self.replicas.of_group(replica.group)]
        workers = places.count(here) + more
        edges = [edge for edge in self._plan.edges if edge.source in mine or edge.target in mine]
        self._placement.spawn(
            WorkerSpec(
                worker=replica.worker,
                replica=replica.index,
                family=source.family,
                model_dir=source.model_dir,
                transforms=source.transforms,
                stages=[msgspec.to_builtins(stages[name]) for name in replica.group],
                edges=[msgspec.to_builtins(edge) for edge in edges],
                replayable=[name for name, stage in self._plan.stages.items() if kind_of(stage.engine).replayable],
                limits=msgspec.to_builtins(self._plan.limits),
                inbox=f"ipc://{host.runtime_dir}/{replica.worker}",
                orchestrator=self._address,
                connector=f"{host.runtime_dir}/{replica.worker}.shm",
                load_format=self._load_format,
                shared={name: here[1] for name in replica.group if shares_weights(self._plan.stages[name], workers)},
                skip_tokenizer_init=self._plan.skip_tokenizer_init,
                network=host.network,
            ),
            replica.node,
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
            return  # it has died meanwhile
        replica.address = message.address
        replica.state, replica.loading, replica.failures = "ready", 1.0, 0
        self.replicas.facts.update(message.stages)
        self.adapters.ready(replica)
        self.moves.ready(replica)
        self._on_progress(message.worker, 1.0, "ready")
        starting = self.starting
        if self._started is not None and starting and self.replicas.ready():
            self._started.set_result(None)
        if not starting or replica.node != SERVER:  # the progress of a start names workers without their nodes
            log.info("worker %s (%s) is ready", replica.worker, replica.node)
        self._owner.worker_ready()

    def _on_start_failed(self, message: StartFailed) -> None:
        error = ConfigError(f"worker {message.worker!r} could not start: {message.message}", stage=message.worker)
        if not self._fail_start(error):  # else the caller of `start` reports it
            log.error("%s", error)

    def _fail_start(self, error: BaseException) -> bool:
        """End `start` with an error; False if it has ended already."""
        if self._started is None or self._started.done():
            return False
        self._started.set_exception(error)
        return True

    # ── watching ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch_over(self, hangs: HangWatch) -> None:
        """Ping the workers that have requests; kill those that have not answered for too long."""
        seen = hangs.look(self.replicas.all, time.monotonic())
        for replica in seen.ask:
            self.send(replica.address, Ping())
        for replica in seen.kill:
            assert replica.pid is not None, "only a running worker is killed"
            log.error(
                "worker %s (pid %s) has not answered for %g s: killing it", replica.worker, replica.pid, hangs.limit
            )
            self._placement.kill(replica.pid, replica.node)
        self._watch = self._loop.call_later(hangs.interval, self._watch_over, hangs)

    def _watch_links(self) -> None:
        """Cut off the workers on other hosts to which a connection was lost."""
        assert self._out is not None, "made by `_open`"
        for address in self._out.lost():
            if (replica := self.replicas.by_address(address)) is not None:
                self._cut_off(replica.worker)
        self._look = self._loop.call_later(BEAT_SECONDS, self._watch_links)

    def _cut_off(self, worker: str) -> None:
        """Kill a worker whose connection to the server was lost, and messages with it; its requests go on elsewhere at
        once. If its host cannot be reached either, the host is lost soon."""
        replica = self.replicas.by_worker(worker)
        if replica is None or replica.cut_off or replica.pid is None:
            return
        planned, was_alive = replica.leaving, replica.alive
        replica.state, replica.cut_off = "restarting", True
        log.error("the connection to worker %s (%s) was lost, or messages with it: killing it", worker, replica.node)
        self.kill(replica)
        if was_alive:
            self._owner.worker_lost(replica.group[-1], planned=planned)

    def _on_stats(self, message: Stats) -> None:
        if replica := self.replicas.by_worker(message.worker):
            self.stats[message.worker] = message
            replica.pinged = None
            self.moves.consider(time.monotonic())

    # ── deaths ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_exit(self, worker: str, how: str) -> None:
        replica = self.replicas.by_worker(worker)
        if replica is None or self.stopping:
            return
        was_ready = replica.alive or replica.cut_off
        moving = replica.leaving
        log.log(logging.INFO if moving else logging.WARNING, "worker %s (pid %s) ended: %s", worker, replica.pid, how)
        if not was_ready:
            replica.failures += 1
            if self.starting:
                error = ConfigError(f"worker {worker!r} died while starting: {how}")
                # a worker that exits by itself sends `StartFailed`, which may arrive after the notice of its exit
                self._loop.call_later(SAID_WHY_WITHIN if how == "exit 0" else 0.5, self._fail_start, error)
                replica.state = "failed"
                return
        self._bury(replica)
        if self.moves.exited(replica):
            pass  # it was to end
        elif replica.failures >= GIVE_UP_AFTER:
            replica.state = "failed"
            self.moves.failed(replica)
        else:
            self.spawn(replica)
        self._owner.worker_lost(replica.group[-1], planned=moving)

    def _on_node(self, node: str) -> None:
        """Start the workers of a node that has joined."""
        if self.stopping:
            return
        for replica in self.replicas.all:
            if replica.node == node:
                replica.failures = 0
                self.spawn(replica)

    def _on_node_lost(self, node: str, why: str) -> None:
        """Handle the death of all workers of a node. Until it joins again, its stages have those of other nodes."""
        if self.stopping:
            return
        lost = [replica for replica in self.replicas.all if replica.node == node]
        for replica in lost:
            self._bury(replica)
            self.spawn(replica)  # waits for the node
            self.moves.failed(replica)
        for stage in dict.fromkeys(replica.group[-1] for replica in lost):
            self._owner.worker_lost(stage)

    def has_node(self, node: str) -> bool:
        """Whether workers can be started on a node now."""
        return self._placement.host(node) is not None

    def may_have(self, node: str) -> bool:
        """Whether workers can be started on a node, now or when it has been brought for them."""
        return self._placement.may_have(node)

    def update_nodes(self) -> None:
        """Have the nodes brought that workers need, and those given back that have none."""
        self._placement.need(self._nodes())

    def _nodes(self) -> set[str]:
        return {replica.node for replica in self.replicas.all}

    def kill(self, replica: Replica) -> None:
        """SIGKILL a worker that runs."""
        if replica.pid is not None:
            self._placement.kill(replica.pid, replica.node)

    def _bury(self, replica: Replica) -> None:
        """Make sure that nobody writes to this incarnation any more."""
        dead, address = replica.worker, replica.address
        replica.state, replica.buried = "restarting", True
        replica.clear()
        self.stats.pop(dead, None)
        self.adapters.lost(dead)
        if self._out is not None:
            self._out.forget(address)
        for other in self.replicas.all if address else ():
            if other.alive:
                self.send(other.address, PeerLost(dead, address))

    def _on_placement_lost(self) -> None:
        """Start this host's workers again after the fork server died, and every one of them with it."""
        if self.stopping or self._fail_start(ConfigError("the fork server died while the stages were loading")):
            return
        log.error("the fork server died; starting every worker of this host again")
        self.moves.abort(StageLost("the fork server died while the worker was moving"))
        lost = [replica for replica in self.replicas.all if replica.node == SERVER]
        for replica in lost:
            self._bury(replica)
        self._spawn_task(self._reopen(lost))
        self._owner.worker_lost("the fork server")

    async def _reopen(self, lost: list[Replica]) -> None:
        assert self._inbox is not None, "workers die after the start only"
        self._inbox.unbind(self._local)
        await self._placement.restart()
        self._listen_here()
        for replica in lost:
            self.spawn(replica)

    # ── its own tasks ──────────────────────────────────────────────────────────────────────────────────────────────

    def _spawn_task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Fail all requests when a task dies, so that none waits forever, and report it in `/health`. A dead reader is
        a bug of ours; a fork server that does not restart is a fault of the machine."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or isinstance(error, zmq.ZMQError):
            return
        log.error("the orchestrator's own task failed", exc_info=error)
        self._fail_start(error)
        self.moves.abort(SegueError(f"the orchestrator failed: {error}"))
        for replica in self.replicas.all:
            replica.state = "failed"
        self._owner.broken(error)
