"""The consumer's side of the TCP connector: a thread per producer fetches payloads, one after another, into buffers
that are used again."""

from __future__ import annotations

import errno
import mmap
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from segue.connectors.base import Arrived, Coming, Fetched, Gone
from segue.connectors.payload import PayloadError, read_from
from segue.connectors.tcp.producer import end
from segue.connectors.tcp.wire import (
    ANSWER,
    DONE,
    GET,
    GONE,
    HANDSHAKE_SECONDS,
    REQUEST,
    Refused,
    as_consumer,
    receive,
    receive_into,
    tune,
)

KEPT_BYTES = 256 << 20
"""Bytes of buffers that wait for their next payload."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload is to be fetched."""

    host: str
    port: int
    pool: bytes
    number: int
    size: int

    @property
    def key(self) -> tuple[bytes, int]:
        return self.pool, self.number


@dataclass(slots=True)
class Fetch:
    """One payload, from the first call until it is taken or given up."""

    place: Place
    request_id: str
    wake: Callable[[], None]
    found: Fetched
    buffer: mmap.mmap | None = None
    given_up: bool = False


class Buffers:
    """Page-aligned buffers that the kernel has backed with memory, by powers of two; the first touch of fresh memory
    takes longer than the copy into it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._kept = 0

    def take(self, size: int) -> mmap.mmap:
        whole = max(mmap.PAGESIZE, 1 << (size - 1).bit_length())
        with self._lock:
            if free := self._free.get(whole):
                self._kept -= whole
                return free.pop()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        return mmap.mmap(-1, whole, flags=flags)

    def give(self, buffer: mmap.mmap) -> None:
        with self._lock:
            if self._kept + len(buffer) <= KEPT_BYTES:
                self._kept += len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)


class Line:
    """The connection to one producer; once it has failed, it is not used again."""

    def __init__(
        self,
        place: Place,
        key: bytes,
        buffers: Buffers,
        landed: Callable[[Fetch, Fetched], None],
        failed: Callable[[Line], None],
    ) -> None:
        """Called in the line's thread: `landed`, with what became of a fetch; `failed`, when it may be asked for no
        more, before it gives up the fetches that it still has."""
        self._name = f"{place.host}:{place.port}"
        self._address = (place.host, place.port)
        self.pool = place.pool
        self._key = key
        self._buffers = buffers
        self._landed = landed
        self._failed = failed
        self._asked: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._sock: socket.socket | None = None
        self._closing = False
        self._lock = threading.Lock()
        """Guards `_sock` and `_closing`."""
        self._thread = threading.Thread(target=self._run, name="segue-tcp-fetch", daemon=True)
        self._thread.start()

    def ask(self, fetch: Fetch) -> None:
        self._asked.put(fetch)

    def close(self) -> None:
        """End the thread; fetches that are not done never land."""
        with self._lock:
            self._closing = True
            if self._sock is not None:
                end(self._sock)
        self._asked.put(None)
        self._thread.join(HANDSHAKE_SECONDS)

    def _run(self) -> None:
        while (fetch := self._asked.get()) is not None:
            if self._closing:
                continue
            if fetch.given_up:
                self._landed(fetch, Gone("its request was released"))
                continue
            try:
                found = self._fetch(fetch)
            except (Refused, OSError, PayloadError) as error:
                self._give_up(fetch, Gone(f"the fetch from {self._name} failed: {error}"))
                break
            self._landed(fetch, found)
        self._disconnect()

    def _give_up(self, fetch: Fetch | None, reason: Gone) -> None:
        """Fail a fetch and those behind it: each would wait as long for a host that is gone."""
        self._failed(self)
        while True:
            if fetch is not None:
                self._landed(fetch, reason)
            try:
                fetch = self._asked.get_nowait()
            except queue.Empty:
                return

    def hung_up(self) -> bool:
        """Whether the producer has closed the connection."""
        with self._lock:
            if self._sock is None or self._sock.gettimeout() is not None:
                return False  # it connects
            try:
                return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except OSError as error:
                return error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK)

    def end(self) -> None:
        """End the thread when it has done what it was asked."""
        self._asked.put(None)

    def _fetch(self, fetch: Fetch) -> Fetched:
        sock = self._sock or self._connect()
        place = fetch.place
        sock.sendall(REQUEST.pack(GET, place.number))
        (size,) = ANSWER.unpack(receive(sock, ANSWER.size))
        if size == GONE:
            return Gone("its request was released, or it was taken before")
        if size != place.size:
            raise Refused(f"{size} bytes came for a payload of {place.size}")
        buffer = self._buffers.take(size)
        try:
            view = memoryview(buffer)[:size]
            receive_into(sock, view)
            sock.sendall(REQUEST.pack(DONE, place.number))
            payload = read_from(view)
        except BaseException:
            self._buffers.give(buffer)
            raise
        fetch.buffer = buffer
        return Arrived(payload, size)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self._address, HANDSHAKE_SECONDS)
        with self._lock:
            if self._closing:
                sock.close()
                raise ConnectionAbortedError("the connector is closed")
            self._sock = sock
        tune(sock)
        if as_consumer(sock, self._key) != self.pool:
            raise Refused("the producer has ended, and another one listens there")
        sock.settimeout(None)
        return sock

    def _disconnect(self) -> None:
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None


class Consumer:
    """The payloads that one worker fetches, or has taken. Thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._lines: dict[bytes, Line] = {}
        self._buffers = Buffers()
        self._fetches: dict[str, dict[tuple[bytes, int], Fetch]] = {}
        """Request → payload → its fetch, until the release; what was taken stays as `Gone`."""

    def fetch(self, place: Place, request_id: str, wake: Callable[[], None]) -> Fetched:
        """As `Connector.fetch`."""
        with self._lock:
            fetches = self._fetches.setdefault(request_id, {})
            fetch = fetches.get(place.key)
            if fetch is None:
                fetch = fetches[place.key] = Fetch(place, request_id, wake, Coming())
                self._line(place).ask(fetch)
            found = fetch.found
            if isinstance(found, Arrived):
                fetch.found = Gone("it was taken before")
            return found

    def taken_inline(self, request_id: str, pool: bytes, number: int) -> bool:
        """Record that a payload in metadata was taken; false if it was taken before."""
        with self._lock:
            fetches = self._fetches.setdefault(request_id, {})
            if (pool, -number) in fetches:
                return False
            place = Place("", 0, pool, -number, 0)
            fetches[place.key] = Fetch(place, request_id, lambda: None, Gone("it was taken before"))
            return True

    def release(self, request_id: str, key: tuple[bytes, int] | None) -> None:
        """Free what was fetched for a request, or one payload of it."""
        with self._lock:
            fetches = self._fetches.get(request_id, {})
            for one in list(fetches) if key is None else [key]:
                fetch = fetches.get(one)
                if fetch is None:
                    continue
                fetch.given_up = True
                if fetch.buffer is not None:
                    self._buffers.give(fetch.buffer)
                    fetch.buffer = None
                fetch.found = Gone("it was released")
            if key is None:
                self._fetches.pop(request_id, None)

    def close(self) -> None:
        """Disconnect from every producer."""
        with self._lock:
            lines, self._lines = self._lines, {}
            self._fetches.clear()
        for line in lines.values():
            line.close()

    def _line(self, place: Place) -> Line:
        line = self._lines.get(place.pool)
        if line is None:
            for other in [other for other in self._lines.values() if other.hung_up()]:
                del self._lines[other.pool]
                other.end()
            line = Line(place, self._key, self._buffers, self._landed, self._failed)
            self._lines[place.pool] = line
        return line

    def _failed(self, line: Line) -> None:
        with self._lock:
            if self._lines.get(line.pool) is line:
                del self._lines[line.pool]

    def _landed(self, fetch: Fetch, found: Fetched) -> None:
        with self._lock:
            if fetch.given_up:
                if fetch.buffer is not None:
                    self._buffers.give(fetch.buffer)
                    fetch.buffer = None
                return
            fetch.found = found
        fetch.wake()
