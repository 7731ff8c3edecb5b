"""Watch a connection to another host, and notice messages that were lost with it.

ZeroMQ makes a lost connection again by itself, and the messages that were on their way with the old one are gone
without a word. So each side that must not miss any looks at what libzmq says of its connection (`Link`), and between
the server and its workers messages are numbered: one that does not follow the last is not handled, nor any after it
(`InOrder`).

Optional reading: only between hosts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from segue.messages.addresses import SILENCE_SECONDS


class Link:
    """The connection of a socket to a peer on another host."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """`socket`: it has not begun to connect."""
        self._socket = socket
        self.events: zmq.Socket[bytes] = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        """Readable when something has happened to the connection."""
        self._connecting: float | None = time.monotonic()
        """time.monotonic() since which it is being made; None: it is there."""
        self._lost = False
        """Reported as lost."""

    def news(self) -> Iterator[bool]:
        """Yield false when the connection was lost, or could not be made for `SILENCE_SECONDS`, and true when it is
        back after that, in order."""
        while self.events.poll(0):
            if (reachable := self._happened(recv_monitor_message(self.events)["event"])) is not None:
                yield reachable
        if (due := self.due()) is not None and time.monotonic() >= due:
            self._lost = True
            yield False

    def due(self) -> float | None:
        """Return the time.monotonic() at which it counts as lost if it is not made; None: it is there, or lost."""
        return None if self._lost or self._connecting is None else self._connecting + SILENCE_SECONDS

    def _happened(self, event: int) -> bool | None:
        """Record an event. Returns whether the peer is reachable, if that is news."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connecting = None
            back, self._lost = self._lost, False
            return True if back else None
        if event == zmq.EVENT_DISCONNECTED and self._connecting is None:
            self._connecting, self._lost = time.monotonic(), True
            return False
        return None

    def close(self) -> None:
        """Watch no more; before the socket is closed."""
        self._socket.disable_monitor()
        self.events.close(linger=0)


class Numbers:
    """Numbers the messages that one sender sends to one receiver."""

    def __init__(self) -> None:
        self._next = 0

    def next(self) -> bytes:
        """Return the number of the next message."""
        number, self._next = self._next, self._next + 1
        return number.to_bytes(8, "big")


class InOrder:
    """Checks the numbers of the messages that one receiver gets from one sender."""

    def __init__(self) -> None:
        self._next = 0
        self.missed = False
        """A message was lost: those that came after it are incomplete."""

    def follows(self, number: bytes) -> bool:
        """Whether a message follows the last one, and none was missed before."""
        self.missed = self.missed or int.from_bytes(number, "big") != self._next
        self._next += 1
        return not self.missed
