"""A worker's ZeroMQ sockets: one inbox for all senders, and one push socket per address it writes to.

A connection to another host may be lost, and the messages that were on their way with it; a new one is then made. So
connections to other hosts are watched, and `changes` says which were lost and which are back. What goes to and comes
from the server is numbered as well (`segue.messages.connection`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import zmq

from segue.messages.addresses import Network, endpoint, joined, node_of, port_of, protect
from segue.messages.connection import InOrder, Link, Numbers


class Peers:
    """Sends and receives messages. Sends never block (edge budgets bound them); a dead peer costs only its socket."""

    def __init__(self, inbox: str, network: Network | None = None, *, server: str = "", name: str = "") -> None:
        """`inbox`: the endpoint on this host. `network`: set if others are on other hosts. `server`: the server's
        address. `name`: this worker's, by which the server knows it."""
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))  # two per peer; by default 1,023
        self._server = server
        self._name = name.encode()
        self._to_server = Numbers()
        self._from_server = InOrder()
        self._told_missed = False
        self._network = network
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._local = self.address = inbox
        if network is not None:
            protect(self._inbox, network.public, network.secret, listens=True)
            self._inbox.bind(f"tcp://{network.host}:*")
            self.address = joined(network, inbox, f"tcp://{network.host}:{port_of(self._inbox)}")
        self._inbox.bind(inbox)
        self._out: dict[str, zmq.Socket[bytes]] = {}
        self._links: dict[str, Link] = {}
        """Address → the connection to it, if it is on another host."""
        self._poller = zmq.Poller()
        """Of the inbox and the events of all links."""
        self._poller.register(self._inbox, zmq.POLLIN)
        self._dead: set[str] = set()
        """Addresses of dead incarnations, which are never reused; a socket to one would try to connect forever."""

    def send(self, address: str, data: bytes) -> None:
        if address in self._dead:
            return
        socket = self._out.get(address)
        if socket is None:
            socket = self._out[address] = self._open(address)
        if address == self._server and address in self._links:
            socket.send_multipart([self._to_server.next(), self._name, data])
        else:
            socket.send(data)

    def _open(self, address: str) -> zmq.Socket[bytes]:
        if node_of(address) == self.node:
            return self._push(endpoint(address, self.node))
        socket = self._unconnected()
        link = self._links[address] = Link(socket)
        self._poller.register(link.events, zmq.POLLIN)
        socket.connect(endpoint(address, self.node))
        return socket

    @property
    def node(self) -> str:
        """The node that this worker is on."""
        return node_of(self.address)

    def forget(self, address: str) -> None:
        """Drop the messages queued for a dead peer."""
        self._dead.add(address)
        socket = self._out.pop(address, None)
        if socket is not None:
            self._unwatch(address)
            socket.close(linger=0)

    def _unwatch(self, address: str) -> None:
        if link := self._links.pop(address, None):
            self._poller.unregister(link.events)
            link.close()

    def changes(self) -> list[tuple[str, bool]]:
        """Return (address, reachable) of the peers on other hosts to which a connection was lost, or that could not be
        reached for `SILENCE_SECONDS` (false), and of those that were lost and can be reached again (true), in order.
        The server is one of them, also if only a message of it was lost."""
        found = [(address, news) for address, link in self._links.items() for news in link.news()]
        if self._from_server.missed and not self._told_missed:
            self._told_missed = True
            found.append((self._server, False))
        return found

    def _wait(self) -> None:
        """Return when there is a message, a link has changed, or one may be overdue."""
        dues = [due for link in self._links.values() if (due := link.due()) is not None]
        left = min(dues) - time.monotonic() if dues else None
        self._poller.poll(None if left is None else max(0, math.ceil(1000 * left)))

    def receive(self, *, wait: bool) -> Iterator[bytes]:
        """Yield all received messages; with `wait`, wait for at least one, for `wake`, or for `changes`."""
        if wait and self._links:
            self._wait()
        elif wait and (data := self._taken(self._inbox.recv_multipart())):
            yield data
        while True:
            try:
                if data := self._taken(self._inbox.recv_multipart(zmq.NOBLOCK)):
                    yield data
            except zmq.Again:
                return

    def _taken(self, frames: list[bytes]) -> bytes:
        """Return a message; nothing in place of one of the server that does not follow the last."""
        *number, data = frames
        return data if not number or self._from_server.follows(number[0]) else b""

    def wake(self) -> None:
        """End a waiting `receive`. Any thread may call it: sockets belong to one thread, so it uses its own."""
        try:
            with self._push(self._local) as socket:
                socket.linger = 1000
                socket.send(b"")
        except zmq.ZMQError as error:
            if error.errno not in (zmq.ETERM, zmq.ENOTSUP):  # closed meanwhile: no `receive` waits any more
                raise

    def _push(self, where: str) -> zmq.Socket[bytes]:
        socket = self._unconnected()
        socket.connect(where)
        return socket

    def _unconnected(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        if self._network is not None:
            protect(socket, self._network.public, self._network.secret, listens=False)
        return socket

    def close(self, patience: float = 1.0) -> None:
        """Flush sent messages, waiting at most `patience` seconds for peers that may be gone."""
        for address, socket in self._out.items():
            self._unwatch(address)
            socket.close(linger=round(1000 * patience))
        self._out.clear()
        self._inbox.close(linger=0)
        self._context.term()
