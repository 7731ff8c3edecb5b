"""Place workers on this host and on hosts that have joined (`segue join`).

A node is lost when its agent leaves, gives no sign of life for `LOST_SECONDS`, or has sent messages that did not
arrive. What comes from it after that is of an old generation and is answered with `Fenced`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85

from segue.graph.deployment.deployment import Hardware
from segue.graph.machine.account import described
from segue.messages.addresses import SERVER, Network, protect
from segue.messages.errors import ConfigError, nearest
from segue.messages.join import (
    BEAT_SECONDS,
    LOST_SECONDS,
    Beat,
    Fenced,
    Join,
    Leave,
    Listen,
    News,
    NodeFailed,
    NodeReady,
    Order,
    Refused,
    ToAgent,
    Welcome,
    encode,
    secret_of,
    to_server,
    wire_version,
)
from segue.messages.process import Exited, Kill, Spawn, Spawned, WorkerSpec
from segue.orchestrator.workers.nodes.ray_agents import RayAgents
from segue.orchestrator.workers.placement import Host, LocalPlacement
from segue.orchestrator.workers.versions import OTHER_MESSAGES, version_of_segue

log = logging.getLogger(__name__)


def curve_keys(token: str) -> tuple[bytes, bytes]:
    """Return the (public, secret) CurveZMQ keys of a token."""
    secret: bytes = z85.encode(secret_of(token))
    return zmq.curve_public(secret), secret


@dataclass(slots=True)
class _Node:
    name: str
    agent: bytes
    """Identity of its agent's socket."""
    generation: int
    last_message: float
    """time.monotonic() of its last sign of life."""
    hardware: Hardware | None
    host: Host | None = None
    """Set once workers can be spawned there."""
    sent: int = 0
    """Orders of this generation."""
    received: int = 0
    """What has come of `NodeReady` and `News` of this generation."""


class NodePlacement:
    """`Placement` over several hosts: the local one, and those that join."""

    def __init__(
        self,
        local: LocalPlacement,
        listen: Listen,
        expected: Sequence[str],
        welcome: Welcome,
        *,
        agents: RayAgents | None = None,
        check: Callable[[str, Hardware], object] = lambda node, hardware: None,
        on_spawned: Callable[[str, int], None],
        on_exit: Callable[[str, str], None],
        on_node: Callable[[str], None],
        on_node_lost: Callable[[str, str], None],
    ) -> None:
        """`expected`: names of the nodes that the deployment has. `welcome`: the answer to them. `agents`: start
        them; None: others do. `check(node, hardware)` raises `ConfigError` if its stages do not fit a node.
        `on_node(node)`: workers can be spawned there; `on_node_lost(node, why)`: all its workers are lost."""
        self._agents = agents
        self._check = check
        self._local = local
        self._listen = listen
        self._expected = expected
        self._welcome = welcome
        self._on_spawned = on_spawned
        self._on_exit = on_exit
        self._on_node = on_node
        self._on_node_lost = on_node_lost
        public, secret = zmq.curve_keypair()
        self._network = Network(SERVER, listen.host, public, secret, os.urandom(32))
        self._nodes: dict[str, _Node] = {}
        self._generations: dict[str, int] = {}
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def runtime_dir(self) -> str:
        """The local one; each node has its own."""
        return self._local.runtime_dir

    @property
    def no_kernels(self) -> str:
        """Of this host."""
        return self._local.no_kernels

    async def start(self) -> None:
        """Start the fork server of this host, and listen for others. Raises `ConfigError` if the address is taken."""
        await self._local.start()
        try:
            self._open()
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        missing = [name for name in self._expected if name not in self._nodes]
        if self._agents is not None:
            self._agents.start()
        elif missing:
            where = f"{self._listen.host}:{self._listen.port}"
            log.info("waiting for %s: run `segue join %s --name NAME` there", ", ".join(missing), where)

    def _open(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.router_handover = True  # an agent whose connection was lost connects again
        protect(self._socket, *curve_keys(self._listen.token), listens=True)
        where = f"tcp://{self._listen.host}:{self._listen.port}"
        try:
            self._socket.bind(where)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {where}: {error}", field="listen") from error

    def host(self, node: str) -> Host | None:
        """Return where workers of a node live; None while it has not joined."""
        if node == SERVER:
            return Host(self._local.runtime_dir, self._network)
        found = self._nodes.get(node)
        return None if found is None else found.host

    def may_have(self, node: str) -> bool:
        """Whether a node is there, or Ray may start it."""
        return self.host(node) is not None or self._agents is not None

    def need(self, nodes: Set[str]) -> None:
        """Have Ray start the nodes that are needed, and give back the others, which have no workers."""
        if self._agents is None:
            return
        for node in [node for node in self._nodes.values() if node.name not in nodes]:
            del self._nodes[node.name]
            self._send(node.agent, Fenced())
            log.info("node %s is given back to the Ray cluster", node.name)
        self._agents.need(nodes)

    def spawn(self, spec: WorkerSpec, node: str) -> None:
        if node == SERVER:
            self._local.spawn(spec, node)
        else:
            self._order(node, Spawn(spec))

    def kill(self, pid: int, node: str) -> None:
        if node == SERVER:
            self._local.kill(pid, node)
        else:
            self._order(node, Kill(pid))

    async def restart(self) -> None:
        """Prepare again to spawn workers on this host; those of the nodes go on."""
        await self._local.restart()

    async def close(self) -> None:
        """End all workers, on every host. Agents that were started elsewhere stay, and join again when there is a
        server again."""
        for node in self._nodes.values():
            self._send(node.agent, Fenced())
        self._nodes.clear()
        if self._agents is not None:
            await self._agents.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._socket is not None and self._context is not None:
            self._socket.close(linger=1000)
            await asyncio.get_running_loop().run_in_executor(None, self._context.term)  # frees the port
            self._socket = self._context = None
        await self._local.close()

    # ── agents ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _order(self, node: str, order: Spawn | Kill) -> None:
        if found := self._nodes.get(node):  # else it is lost, and its workers with it
            found.sent += 1
            self._send(found.agent, Order(found.generation, order))

    def _send(self, agent: bytes, message: ToAgent) -> None:
        if self._socket is not None:
            self._socket.send_multipart([agent, encode(message)])  # done at once: its queue has no bound

    async def _read(self) -> None:
        assert self._socket is not None
        while True:
            agent, data = await self._socket.recv_multipart()
            try:
                message = to_server.decode(data)
            except msgspec.DecodeError:  # another version of Segue: `Join` may have other fields
                self._send(agent, Refused(f"this server runs Segue {version_of_segue()}; install the same", True))
                continue
            if isinstance(message, Join):
                self._join(agent, message)
                continue
            node = next((node for node in self._nodes.values() if node.agent == agent), None)
            if node is None or node.generation != message.generation:
                self._send(agent, Fenced())
                continue
            node.last_message = time.monotonic()
            node.received += isinstance(message, NodeReady | News)
            match message:
                case NodeReady():
                    network = msgspec.structs.replace(self._network, node=node.name, host=message.host)
                    node.host = Host(message.runtime_dir, network, node.hardware)
                    has = "" if node.hardware is None else f": {described(node.hardware)}"
                    log.info("node %s (%s) has joined%s", node.name, message.host, has)
                    self._on_node(node.name)
                case NodeFailed():
                    self._lose(node, f"its workers cannot start: {message.message}")
                case News(news=Spawned() as spawned):
                    self._on_spawned(spawned.worker, spawned.pid)
                case News(news=Exited() as exited):
                    self._on_exit(exited.worker, exited.how)
                case Leave():
                    self._lose(node, "it has left")
                case Beat() if message.sent != node.received:
                    self._lose(node, "messages of it were lost with its connection")

    def _join(self, agent: bytes, message: Join) -> None:
        ours = version_of_segue()
        if message.version != ours:
            reason = f"this server runs Segue {ours}, the node {message.version}; install the same"
            self._send(agent, Refused(reason, final=True))
            return
        if message.wire != wire_version():
            self._send(agent, Refused(OTHER_MESSAGES, final=True))
            return
        if message.node not in self._expected:
            known = ", ".join(map(repr, self._expected)) or "none"
            reason = (
                f"the deployment has no node {message.node!r}{nearest(message.node, self._expected)}; it has {known}"
            )
            self._send(agent, Refused(reason, final=True))
            return
        hardware = None
        if message.hardware is not None:
            hardware = msgspec.convert(msgspec.to_builtins(message.hardware), Hardware)
            try:
                self._check(message.node, hardware)
            except ConfigError as error:
                self._send(agent, Refused(error.message, final=True))
                return
        if self._agents is not None and message.node not in self._agents.needed:
            self._send(agent, Refused(f"no worker needs node {message.node!r} now", final=False))
            return
        old = self._nodes.get(message.node)
        if old is not None and old.agent != agent:
            self._send(agent, Refused(f"a node {message.node!r} has joined already", final=False))
            return
        if old is not None:
            self._lose(old, "it joins anew")
        generation = self._generations[message.node] = self._generations.get(message.node, 0) + 1
        self._nodes[message.node] = _Node(message.node, agent, generation, time.monotonic(), hardware)
        self._send(agent, msgspec.structs.replace(self._welcome, generation=generation, wire=wire_version()))

    async def _watch(self) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            deaf = max(0.0, now - due)  # something blocked this event loop: no sign of life could be read
            due = now + BEAT_SECONDS
            for node in list(self._nodes.values()):
                node.last_message += deaf
                if now - node.last_message >= LOST_SECONDS:
                    self._lose(node, f"it has given no sign of life for {LOST_SECONDS:g} s")
                else:
                    self._send(node.agent, Beat(node.generation, node.sent))
            await asyncio.sleep(BEAT_SECONDS)

    def _lose(self, node: _Node, why: str) -> None:
        del self._nodes[node.name]
        self._send(node.agent, Fenced())
        log.error("node %s is lost: %s", node.name, why)
        self._on_node_lost(node.name, why)
