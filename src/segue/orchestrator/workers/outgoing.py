"""The server's sockets to its workers, by the addresses of their inboxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zmq

from segue.messages.addresses import SERVER, Network, endpoint, node_of, protect
from segue.messages.connection import Link, Numbers


@dataclass(slots=True)
class _Away:
    """What a socket to a worker on another host has in addition."""

    link: Link
    numbers: Numbers


class Outgoing:
    """Sends messages to workers; sends never block. Connections to other hosts are watched, their messages numbered."""

    def __init__(self, context: zmq.Context[Any], network: Network | None) -> None:
        """`network`: set if there are workers on other hosts."""
        self._context = context
        self._network = network
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._away: dict[str, _Away] = {}

    def send(self, address: str, data: bytes) -> None:
        socket = self._sockets.get(address)
        if socket is None:
            socket = self._sockets[address] = self._open(address)
        away = self._away.get(address)
        if away is None:
            socket.send(data)
        else:
            socket.send_multipart([away.numbers.next(), data])

    def _open(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        if self._network is not None:
            protect(socket, self._network.public, self._network.secret, listens=False)
        if node_of(address) != SERVER:
            self._away[address] = _Away(Link(socket), Numbers())
        socket.connect(endpoint(address, SERVER))
        return socket

    def lost(self) -> list[str]:
        """Return the addresses whose connection has been lost since the last call, or could not be made in time."""
        return [address for address, away in self._away.items() if not all(list(away.link.news()))]

    def forget(self, address: str) -> None:
        """Drop what is queued for a dead worker."""
        socket = self._sockets.pop(address, None)
        if away := self._away.pop(address, None):
            away.link.close()
        if socket is not None:
            socket.close(linger=0)

    def close(self) -> None:
        for address in list(self._sockets):
            self.forget(address)
