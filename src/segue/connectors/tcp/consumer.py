"""The consumer's side of the TCP connector: the connection to one producer."""

from __future__ import annotations

import errno
import socket
import threading

from segue.connectors.base import Gone
from segue.connectors.fetching import Buffers, SourceLost, Taken
from segue.connectors.payload import read_from
from segue.connectors.tcp.producer import end
from segue.connectors.tcp.wire import (
    ANSWER,
    DONE,
    GET,
    GONE,
    HANDSHAKE_SECONDS,
    REQUEST,
    Refused,
    Remote,
    as_consumer,
    receive,
    receive_into,
    tune,
)


class TcpSource:
    """A `Source` over a connection to the producer of `place`."""

    def __init__(self, place: Remote, key: bytes) -> None:
        self.name = f"{place.host}:{place.port}"
        self._address = (place.host, place.port)
        self._pool = place.pool
        self._key = key
        self._sock: socket.socket | None = None
        self._closing = False
        self._lock = threading.Lock()
        """Guards `_sock` and `_closing`."""

    def fetch(self, place: Remote, buffers: Buffers) -> Taken | Gone:
        try:
            return self._fetch(place, buffers)
        except Refused as error:
            raise SourceLost(str(error)) from error

    def hung_up(self) -> bool:
        with self._lock:
            if self._sock is None or self._sock.gettimeout() is not None:
                return False  # it connects
            try:
                return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except OSError as error:
                return error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK)

    def interrupt(self) -> None:
        with self._lock:
            self._closing = True
            if self._sock is not None:
                end(self._sock)

    def close(self) -> None:
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None

    def _fetch(self, place: Remote, buffers: Buffers) -> Taken | Gone:
        sock = self._sock or self._connect()
        sock.sendall(REQUEST.pack(GET, place.number))
        (size,) = ANSWER.unpack(receive(sock, ANSWER.size))
        if size == GONE:
            return Gone("its request was released, or it was taken before")
        if size != place.size:
            raise Refused(f"{size} bytes came for a payload of {place.size}")
        buffer = buffers.take(size)
        with buffers.filling(buffer):
            view = memoryview(buffer)[:size]
            receive_into(sock, view)
            sock.sendall(REQUEST.pack(DONE, place.number))
            return Taken(read_from(view), size, buffer)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self._address, HANDSHAKE_SECONDS)
        with self._lock:
            if self._closing:
                sock.close()
                raise ConnectionAbortedError("the connector is closed")
            self._sock = sock
        tune(sock)
        if as_consumer(sock, self._key) != self._pool:
            raise Refused("the producer has ended, and another one listens there")
        sock.settimeout(None)
        return sock
