"""A worker's ZeroMQ sockets: one inbox for all senders, and one push socket per address it writes to."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from segue.messages.addresses import Network, endpoint, joined, node_of, port_of, protect


class Peers:
    """Sends and receives messages. Sends never block (edge budgets bound them); a dead peer costs only its socket."""

    def __init__(self, inbox: str, network: Network | None = None) -> None:
        """`inbox`: the endpoint on this host. `network`: set if others are on other hosts."""
        self._context = zmq.Context()
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
        self._dead: set[str] = set()
        """Addresses of dead incarnations, which are never reused; a socket to one would try to connect forever."""

    def send(self, address: str, data: bytes) -> None:
        if address in self._dead:
            return
        socket = self._out.get(address)
        if socket is None:
            socket = self._push(endpoint(address, self.node))
            self._out[address] = socket
        socket.send(data)

    @property
    def node(self) -> str:
        """The node that this worker is on."""
        return node_of(self.address)

    def forget(self, address: str) -> None:
        """Drop the messages queued for a dead peer."""
        self._dead.add(address)
        socket = self._out.pop(address, None)
        if socket is not None:
            socket.close(linger=0)

    def receive(self, *, wait: bool) -> Iterator[bytes]:
        """Yield all received messages; with `wait`, wait for at least one, or for `wake`."""
        if wait and (data := self._inbox.recv()):
            yield data
        while True:
            try:
                if data := self._inbox.recv(zmq.NOBLOCK):
                    yield data
            except zmq.Again:
                return

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
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        if self._network is not None:
            protect(socket, self._network.public, self._network.secret, listens=False)
        socket.connect(where)
        return socket

    def close(self, patience: float = 1.0) -> None:
        """Flush sent messages, waiting at most `patience` seconds for peers that may be gone."""
        for socket in self._out.values():
            socket.close(linger=round(1000 * patience))
        self._out.clear()
        self._inbox.close(linger=0)
        self._context.term()
