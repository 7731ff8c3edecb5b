"""The agent of a host that has joined a server: it spawns workers as the server says, and reports their ends.

It keeps to one generation at a time. When the server fences it, or falls silent, it ends its workers and joins anew:
their requests have gone on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping

import msgspec
import zmq
import zmq.asyncio

from segue.graph.machine.hardware import detect_hardware
from segue.messages.addresses import protect
from segue.messages.errors import ConfigError
from segue.messages.join import (
    BEAT_SECONDS,
    LOST_SECONDS,
    Beat,
    Fenced,
    Join,
    Leave,
    News,
    NodeFailed,
    NodeHardware,
    NodeReady,
    Order,
    Refused,
    ToServer,
    Welcome,
    encode,
    to_agent,
    wire_version,
)
from segue.messages.process import Exited, Spawn, Spawned
from segue.orchestrator.workers.nodes.node_placement import curve_keys
from segue.orchestrator.workers.placement import LocalPlacement
from segue.orchestrator.workers.versions import OTHER_MESSAGES, version_of_segue

log = logging.getLogger(__name__)


class Agent:
    """A node of the server at `host`:`port`."""

    def __init__(
        self, host: str, port: int, token: str, node: str, *, address: str | None, models: Mapping[str, str]
    ) -> None:
        """`address`: of the interface by which the others reach this host; None: the one that leads to the server.
        `models`: directory of the checkpoint on the server → where this host has it; an empty key stands for any."""
        self._server = (host, port)
        self._token = token
        self._node = node
        self._address = address
        self._models = models
        self._hardware: NodeHardware | None = None
        """Known once it runs."""
        self._generation = 0
        self._sent = self._received = 0
        """Messages of this generation that its beats count, in either direction."""
        self._last_message = 0.0
        self._over: asyncio.Event = asyncio.Event()
        """Set when this generation is over."""
        self._why = ""
        self._socket: zmq.asyncio.Socket | None = None
        self._placement: LocalPlacement | None = None

    async def run(self) -> None:
        """Be a node until cancelled; join again whenever a generation is over. Raises `ConfigError` if the server
        refuses for good."""
        found = await asyncio.get_running_loop().run_in_executor(None, detect_hardware)  # which asks the GPUs' driver
        self._hardware = msgspec.convert(msgspec.to_builtins(found), NodeHardware)
        while True:
            self._why = await self._be_a_node()
            log.warning("%s; joining again", self._why)

    async def _be_a_node(self) -> str:
        """Join, serve one generation, end its workers; return why it is over."""
        context = zmq.asyncio.Context()
        sock = self._socket = context.socket(zmq.DEALER)
        sock.set_hwm(0)
        sock.routing_id = b"node-" + os.urandom(8)
        protect(sock, *curve_keys(self._token), listens=False)
        sock.connect(f"tcp://{self._server[0]}:{self._server[1]}")
        self._over = asyncio.Event()
        tasks: list[asyncio.Task[None]] = []
        try:
            welcome = await self._join(sock)
            if welcome is None:
                return self._why
            self._generation, self._last_message = welcome.generation, time.monotonic()
            self._sent = self._received = 0
            tasks = [asyncio.create_task(self._read(sock)), asyncio.create_task(self._beat())]
            await self._start(welcome)
            await self._over.wait()
            for task in tasks:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            return self._why
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._placement is not None:
                await self._placement.close()
                self._placement = None
            if self._generation:
                self._tell(Leave(self._generation))
                self._generation = 0
            self._socket = None
            sock.close(linger=500)
            await asyncio.get_running_loop().run_in_executor(None, context.term)

    async def _join(self, sock: zmq.asyncio.Socket) -> Welcome | None:
        """Ask to join; None if there is no answer. Raises `ConfigError` if the server refuses for good."""
        where = f"{self._server[0]}:{self._server[1]}"
        said = ""
        while True:
            self._tell(Join(self._node, version_of_segue(), wire_version(), self._hardware))
            if not await sock.poll(round(1000 * LOST_SECONDS)):
                self._end(f"no answer from {where}; is the server running with --listen, and is this its token?")
                return None
            match to_agent.decode(await sock.recv()):
                case Welcome() as welcome if welcome.wire != wire_version():
                    raise ConfigError(f"{where}: {OTHER_MESSAGES}")
                case Welcome() as welcome:
                    return welcome
                case Refused() as refused if refused.final:
                    raise ConfigError(f"{where} refuses this node: {refused.reason}")
                case Refused() as refused:
                    if said != refused.reason:
                        said = refused.reason
                        log.warning("%s; asking until it is gone", refused.reason)
            await asyncio.sleep(BEAT_SECONDS)

    async def _start(self, welcome: Welcome) -> None:
        """Start the fork server and say so."""
        placement = LocalPlacement(
            welcome.preload,
            gpus=welcome.gpus,
            on_spawned=lambda worker, pid: self._tell(News(self._generation, Spawned(worker, pid))),
            on_exit=lambda worker, how: self._tell(News(self._generation, Exited(worker, 0, how))),
            on_lost=lambda: self._end("the fork server died"),
        )
        try:
            await placement.start()
        except ConfigError as error:
            self._tell(NodeFailed(self._generation, error.message))
            raise
        self._placement = placement
        address = self._address or _address_towards(self._server)
        self._tell(NodeReady(self._generation, placement.runtime_dir, address))
        log.info("joined %s:%d as node %s (%s)", *self._server, self._node, address)

    async def _read(self, sock: zmq.asyncio.Socket) -> None:
        try:
            while True:
                message = to_agent.decode(await sock.recv())
                self._last_message = time.monotonic()
                match message:
                    case Fenced():
                        self._end("the server ended this node's generation")
                    case Beat() if message.generation == self._generation and message.sent != self._received:
                        self._end("messages of the server were lost with the connection")
                    case Order() if message.generation == self._generation and self._placement is not None:
                        self._received += 1
                        order = message.order
                        if isinstance(order, Spawn):
                            spec = order.spec
                            model = self._models.get(spec.model_dir, self._models.get("", spec.model_dir))
                            self._placement.spawn(msgspec.structs.replace(spec, model_dir=model), self._node)
                        else:
                            self._placement.kill(order.pid, self._node)
        finally:
            self._over.set()

    async def _beat(self) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            self._last_message += max(0.0, now - due)  # this process was stopped meanwhile
            due = now + BEAT_SECONDS
            if now - self._last_message >= LOST_SECONDS:
                self._end(f"the server has given no sign of life for {LOST_SECONDS:g} s")
                return
            self._tell(Beat(self._generation, self._sent))
            await asyncio.sleep(BEAT_SECONDS)

    def _end(self, why: str) -> None:
        self._why = why
        self._over.set()

    def _tell(self, message: ToServer) -> None:
        if self._socket is not None:
            self._sent += isinstance(message, NodeReady | News)
            self._socket.send(encode(message))  # done at once: its queue has no bound


def _address_towards(server: tuple[str, int]) -> str:
    """Return the address of this host on the interface that leads to the server. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(server)
        except OSError as error:
            raise ConfigError(f"no way to {server[0]!r}: {error}; is the host right?") from error
        address: str = probe.getsockname()[0]
        return address
