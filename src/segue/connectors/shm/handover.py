"""Pass the descriptors of a pool to its receivers, once each, over a Unix socket, and detect a receiver's death.

The socket's name is in the abstract namespace: no file, so no cause of death leaves one behind. Both ends check the
other's user id (SO_PEERCRED), since an abstract name has no permissions. Packets (SOCK_SEQPACKET):

    producer → receiver   pool id (8 bytes), the receiver's number     on connecting
    receiver → producer   0, number of a segment                       when first needed
    producer → receiver   its number, its pages + its descriptor       or 0 pages and none: no such segment
    receiver → producer   1, generation of a payload it has taken      when it cannot open the payload's device memory
    producer → receiver   that generation, the size + a memfd copy     or 0 bytes and none: no memory, or not taken

The connection stays open as long as the receiver lives: when it ends, for any reason, the receiver's payloads are
freed.
"""

from __future__ import annotations

import mmap
import os
import select
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from segue.connectors.device.memory import Imported
from segue.connectors.shm.pool import Pool
from segue.connectors.shm.segment import RECEIVERS, Segment
from segue.messages.errors import ConfigError

POOL_ID_BYTES = 8
_HELLO = struct.Struct(f"<{POOL_ID_BYTES}sI")
_ASK = struct.Struct("<BQ")
_SEGMENT, _COPY = range(2)
_ANSWER = struct.Struct("<IQ")
_COPIED = struct.Struct("<QQ")
PATIENCE_S = 10.0
"""How long a receiver waits for a producer that is alive but does not answer (stopped, or starved of CPU)."""


CopyOut = Callable[[int, int], tuple[int, int] | None]
"""(generation, receiver) → a new memfd with a copy of that payload's device memory, and its size. For a receiver that
cannot open that memory; it needs no space in the pool, so a full pool does not prevent it."""


def _abstract(address: str) -> str:
    name = f"\0segue-shm-{address}"
    if not address or len(name.encode()) > 107:
        raise ConfigError(f"connector address is {address!r}; it must have 1 to 96 bytes", field="address")
    return name


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid == os.getuid()


class HandOver:
    """The producer's end: one listening socket and one thread, from construction to `close`."""

    def __init__(self, address: str, pool_id: bytes, pool: Pool, copy_out: CopyOut) -> None:
        """`copy_out` is called in this object's own thread."""
        self._copy_out = copy_out
        self._pool_id = pool_id
        self._pool = pool
        self._receivers: dict[socket.socket, int] = {}
        self._last = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(_abstract(address))
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"connector address {address!r}: {error.strerror}", field="address") from error
        except ConfigError:
            self._listener.close()
            raise
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"segue-shm-{address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and every connection."""
        self._wake.close()
        self._thread.join()
        for connection in self._receivers:
            connection.close()
        self._selector.close()
        self._woken.close()
        self._listener.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._answer(key.fileobj)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it disconnected, or no descriptor is left: serve the others
            return
        connection.setblocking(False)
        if self._last == RECEIVERS - 1 or not _same_user(connection):
            connection.close()
            return
        self._last += 1
        self._receivers[connection] = self._last
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.send(_HELLO.pack(self._pool_id, self._last))
        except OSError:
            self._drop(connection)

    def _answer(self, connection: Any) -> None:
        try:
            packet = connection.recv(_ASK.size)
            if len(packet) != _ASK.size:  # disconnected, or not our protocol
                self._drop(connection)
                return
            what, index = _ASK.unpack(packet)
            if what == _COPY:
                self._answer_copy(connection, index)
                return
            segment = self._pool.segment(index)
            if segment is None:
                connection.send(_ANSWER.pack(index, 0))
                return
            fd = segment.reopen()
            try:
                socket.send_fds(connection, [_ANSWER.pack(index, segment.pages)], [fd])
            finally:
                os.close(fd)
        except OSError:
            self._drop(connection)

    def _answer_copy(self, connection: socket.socket, generation: int) -> None:
        copied = self._copy_out(generation, self._receivers[connection])
        if copied is None:
            connection.send(_COPIED.pack(generation, 0))
            return
        fd, size = copied
        try:
            socket.send_fds(connection, [_COPIED.pack(generation, size)], [fd])
        finally:
            os.close(fd)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        self._pool.receiver_gone(self._receivers.pop(connection))


class Line:
    """The receiver's end of one connection, with the segments mapped through it."""

    def __init__(self, connection: socket.socket, pool_id: bytes, receiver: int) -> None:
        self.connection = connection
        self._segments: dict[int, Segment] = {}
        self._copies: dict[int, mmap.mmap | None] = {}
        """Answers by generation; an answer that came too late for its call stays here."""
        self.imported: dict[bytes, Imported | None] = {}
        """Handle → device memory of the producer, once opening was tried; None: it cannot be opened here."""
        self._poll = select.poll()
        self._poll.register(connection, select.POLLRDHUP)
        self.pool_id = pool_id
        self.receiver = receiver

    @classmethod
    def open(cls, address: str, patience_s: float = PATIENCE_S) -> Line | None:
        """Connect to the pool at `address`; None if no producer of this user answers within `patience_s`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(patience_s)
        try:
            connection.connect(_abstract(address))
            if _same_user(connection) and len(hello := connection.recv(_HELLO.size)) == _HELLO.size:
                return cls(connection, *_HELLO.unpack(hello))
        except OSError:
            pass
        connection.close()
        return None

    @property
    def dropped(self) -> bool:
        """Whether the producer has closed the connection."""
        return bool(self._poll.poll(0))

    def segment(self, index: int) -> Segment | None:
        """Return the segment, mapping it on first use; None if there is none or the producer does not answer."""
        try:
            if index not in self._segments:
                self.connection.send(_ASK.pack(_SEGMENT, index))
            while index not in self._segments:
                if self._answer() in (None, (_SEGMENT, index)) and index not in self._segments:
                    return None
        except OSError:
            return None
        return self._segments[index]

    def host_copy(self, generation: int) -> mmap.mmap | None:
        """Get this receiver's own host copy of a taken payload's device memory; None: no memory, or no answer."""
        try:
            self.connection.send(_ASK.pack(_COPY, generation))
            while generation not in self._copies:
                if self._answer() is None:
                    return None
        except OSError:
            return None
        return self._copies.pop(generation)

    def _answer(self) -> tuple[int, int] | None:
        """Wait for one answer, store it, and return what it answers; None at the end of the connection. It may be a
        late answer to an earlier call, which is still valid."""
        answer, fds, _, _ = socket.recv_fds(self.connection, _COPIED.size, 1)
        if len(answer) == _COPIED.size:
            generation, size = _COPIED.unpack(answer)
            self._copies[generation] = mmap.mmap(fds[0], size) if fds else None
            for fd in fds:
                os.close(fd)
            return _COPY, generation
        if len(answer) != _ANSWER.size:
            return None
        index, pages = _ANSWER.unpack(answer)
        if fds and index not in self._segments:
            self._segments[index] = Segment(fds[0], pages)
        elif fds:
            os.close(fds[0])
        return _SEGMENT, index

    def close(self) -> None:
        """Disconnect. The producer frees all that was taken over this connection; mapped views stay readable."""
        self.connection.close()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._copies.clear()
        for memory in self.imported.values():
            if memory is not None:
                memory.close()
        self.imported.clear()
