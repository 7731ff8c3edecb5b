"""The bytes of the TCP connector: a handshake that proves both sides know the key, then requests and payloads.

    producer → consumer   magic, nonce                     | pool id, proof
    consumer → producer                     nonce, proof   |                 GET number … DONE number …
    producer → consumer                                                      size, payload (or GONE)

A proof is an HMAC-SHA256 of both nonces and the side. Payloads are neither encrypted nor signed: the network between
the hosts is trusted with them, but nobody else can fetch one or offer one.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec

MAGIC = b"SGT1"
NONCE = 32
POOL_ID = 8
HANDSHAKE_SECONDS = 15.0
"""In which a peer must connect and prove itself; long enough for a link that is down for a few seconds."""
SILENCE_SECONDS = 15
"""A peer whose host answers nothing for this long is lost; a link may be down for less."""

GET, DONE = 1, 2
REQUEST = struct.Struct("<BQ")
"""GET or DONE, number of the payload"""
ANSWER = struct.Struct("<q")
"""Bytes of the payload, or `GONE`"""
GONE = -1

_PROOF = 32


class Remote(msgspec.Struct, frozen=True, tag_field="kind", tag="tcp"):
    """Where a payload is to be fetched."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
    pool: bytes
    number: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    size: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]


class Refused(Exception):
    """The peer does not know the key, or is no peer at all."""


def as_consumer(sock: socket.socket, key: bytes) -> bytes:
    """Prove to a producer that we know the key, have it prove the same, and return its pool id.

    Raises `Refused`, `OSError`.
    """
    theirs = receive(sock, len(MAGIC) + NONCE)
    if theirs[: len(MAGIC)] != MAGIC:
        raise Refused("what answers there is no connector of Segue")
    mine = os.urandom(NONCE)
    nonces = theirs[len(MAGIC) :] + mine
    sock.sendall(mine + _proof(key, b"consumer", nonces))
    answer = receive(sock, POOL_ID + _PROOF)
    pool_id = answer[:POOL_ID]
    if not hmac.compare_digest(answer[POOL_ID:], _proof(key, b"producer" + pool_id, nonces)):
        raise Refused("the producer does not know the key of this system")
    return pool_id


def as_producer(sock: socket.socket, key: bytes, pool_id: bytes) -> None:
    """The other side of `as_consumer`."""
    mine = os.urandom(NONCE)
    sock.sendall(MAGIC + mine)
    answer = receive(sock, NONCE + _PROOF)
    nonces = mine + answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], _proof(key, b"consumer", nonces)):
        raise Refused("a consumer does not know the key of this system")
    sock.sendall(pool_id + _proof(key, b"producer" + pool_id, nonces))


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, side + nonces, "sha256")


def receive(sock: socket.socket, size: int) -> bytes:
    """Receive `size` bytes. Raises `ConnectionResetError` if the stream ends before."""
    data = bytearray(size)
    receive_into(sock, memoryview(data))
    return bytes(data)


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill a buffer from the stream. Raises `ConnectionResetError` if it ends before."""
    have = 0
    while have < len(view):
        got = sock.recv_into(view[have:])
        if got == 0:
            raise ConnectionResetError("the other side closed the connection")
        have += got


def send_parts(sock: socket.socket, parts: Sequence[memoryview | bytes]) -> None:
    """Send buffers in order, without joining them."""
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        sent = sock.sendmsg(left[:512])
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def tune(sock: socket.socket) -> None:
    """Send at once, and notice a host that is gone within `SILENCE_SECONDS`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_SECONDS // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_SECONDS)
