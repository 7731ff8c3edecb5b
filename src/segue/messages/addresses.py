"""Addresses of inboxes, and the keys that protect those on a network.

An inbox on one host is `ipc://PATH`. In a system over several hosts, an address is `NODE ipc://PATH tcp://HOST:PORT`:
processes of the same node use the first endpoint, all others the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import zmq

SERVER = "server"
"""The node of the host that the server runs on."""

SILENCE_SECONDS = 15
"""After which the kernel gives up a connection whose other host answers nothing."""

_CONNECT_SECONDS = 3
"""After which an attempt to connect is given up and the next one begins; the kernel's own pauses grow to a minute."""


class Network(msgspec.Struct, frozen=True):
    """What a process of a system over several hosts needs to reach the others."""

    node: str
    """The node that it runs on."""
    host: str
    """The address of the interface that the others reach it by; it listens there, and nowhere else."""
    public: bytes
    """The system's CurveZMQ keys (Z85), made at the start. One pair serves all: every process may talk to every other,
    and who does not have the public key cannot begin to."""
    secret: bytes
    key: bytes
    """The secret with which connectors prove themselves."""


def joined(network: Network, local: str, remote: str) -> str:
    """Return the address of an inbox with both endpoints."""
    return f"{network.node} {local} {remote}"


def node_of(address: str) -> str:
    """Return the node of an address; `SERVER` if all are on one host."""
    node, space, _ = address.partition(" ")
    return node if space else SERVER


def endpoint(address: str, node: str) -> str:
    """Return the endpoint to which a process of `node` connects."""
    if " " not in address:
        return address
    home, local, remote = address.split(" ")
    return local if home == node else remote


def protect(socket: zmq.Socket[Any], public: bytes, secret: bytes, *, listens: bool) -> None:
    """Encrypt and authenticate a socket's connections, and let it notice lost hosts; before bind or connect."""
    socket.curve_publickey = public
    socket.curve_secretkey = secret
    if listens:
        socket.curve_server = True
    else:
        socket.curve_serverkey = public
        socket.connect_timeout = 1000 * _CONNECT_SECONDS
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = SILENCE_SECONDS // 3
    socket.tcp_keepalive_intvl = SILENCE_SECONDS // 3
    socket.tcp_keepalive_cnt = 2
    socket.tcp_maxrt = 1000 * SILENCE_SECONDS


def port_of(socket: zmq.Socket[Any]) -> int:
    """Return the port that the last `bind` of a tcp endpoint got."""
    bound = socket.last_endpoint
    assert isinstance(bound, bytes)
    return int(bound.decode().rpartition(":")[2])
