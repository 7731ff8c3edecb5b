"""ZeroMQ ends of a worker: one inbox that all pull into, one pushing socket per address written to."""

from __future__ import annotations

from collections.abc import Iterator

import zmq


class Peers:
    """Sends never block (the edge budgets bound what is under way), and a dead peer costs nothing but its socket."""

    def __init__(self, inbox: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(inbox)
        self._address = inbox
        self._out: dict[str, zmq.Socket[bytes]] = {}
        self._dead: set[str] = set()
        """Addresses of incarnations are never used again; a socket to one would look for it for ever."""

    def send(self, address: str, data: bytes) -> None:
        if address in self._dead:
            return
        socket = self._out.get(address)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.connect(address)
            self._out[address] = socket
        socket.send(data)

    def forget(self, address: str) -> None:
        """The peer at this address is dead: drop what was still queued for it."""
        self._dead.add(address)
        socket = self._out.pop(address, None)
        if socket is not None:
            socket.close(linger=0)

    def receive(self, *, wait: bool) -> Iterator[bytes]:
        """Everything that has arrived; with `wait`, at least one message, or nothing where `wake` was called."""
        if wait and (data := self._inbox.recv()):
            yield data
        while True:
            try:
                if data := self._inbox.recv(zmq.NOBLOCK):
                    yield data
            except zmq.Again:
                return

    def wake(self) -> None:
        """End a `receive` that waits. May be called from any thread: sockets belong to one, so it has its own."""
        try:
            with self._context.socket(zmq.PUSH) as socket:
                socket.linger = 1000
                socket.connect(self._address)
                socket.send(b"")
        except zmq.ZMQError as error:
            if error.errno not in (zmq.ETERM, zmq.ENOTSUP):  # closed meanwhile: nobody waits any more
                raise

    def close(self, patience: float = 1.0) -> None:
        """Hand over what was sent, but wait no longer than `patience` seconds for peers that may be gone."""
        for socket in self._out.values():
            socket.close(linger=round(1000 * patience))
        self._out.clear()
        self._inbox.close(linger=0)
        self._context.term()
