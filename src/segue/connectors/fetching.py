"""The consumer's side of connectors between hosts: a thread per producer fetches payloads, one after another, into
buffers that are used again. How a payload comes is the matter of a `Source`.

Optional reading: only connectors between hosts use it.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from segue.connectors.base import Arrived, Coming, Fetched, Gone, Payload
from segue.connectors.payload import PayloadError

log = logging.getLogger(__name__)

KEPT_BYTES = 256 << 20
"""Bytes of buffers that wait for their next payload."""
ASIDE_SECONDS = 120.0
"""For which a buffer is not used again that something may still be written into."""
CLOSE_SECONDS = 15.0
"""In which the threads of a connector that is closed end, if what they wait for can be interrupted."""


class Place(Protocol):
    """Where a payload is to be fetched."""

    @property
    def pool(self) -> bytes:
        """Names the producer."""

    @property
    def number(self) -> int:
        """Names the payload among its producer's; from 1."""


class SourceLost(Exception):
    """The producer is gone, out of reach, or not of this system."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A payload whose tensors are views of `buffer`."""

    payload: Payload
    nbytes: int
    buffer: mmap.mmap


class Source(Protocol):
    """The payloads of one producer. One thread makes all calls but `hung_up` and `interrupt`."""

    @property
    def name(self) -> str:
        """What errors call the producer."""

    def fetch(self, place: Any, buffers: Buffers) -> Taken | Gone:
        """Fetch a payload, however long it takes. Raises `SourceLost`, `OSError` or `PayloadError`; then it is asked no
        more."""

    def hung_up(self) -> bool:
        """Whether the producer has probably ended: nothing is to be expected of it."""

    def interrupt(self) -> None:
        """Let a `fetch` that waits end soon, if it can be interrupted."""

    def close(self) -> None:
        """Disconnect."""


@dataclass(slots=True)
class Fetch:
    """One payload, from the first call until it is taken or given up."""

    place: Place
    wake: Callable[[], None]
    found: Fetched
    buffer: mmap.mmap | None = None
    given_up: bool = False


class Buffers:
    """Page-aligned buffers that the kernel has backed with memory, by powers of two; the first touch of fresh memory
    takes longer than the copy into it. Thread-safe.

    `made` is called with every new buffer, `dropped` with one that will not be used again.
    """

    def __init__(
        self,
        made: Callable[[mmap.mmap], None] = lambda buffer: None,
        dropped: Callable[[mmap.mmap], None] = lambda buffer: None,
    ) -> None:
        self._made = made
        self._dropped = dropped
        self._lock = threading.Lock()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._kept = 0
        self._aside: deque[tuple[float, mmap.mmap]] = deque()

    def take(self, size: int) -> mmap.mmap:
        whole = max(mmap.PAGESIZE, 1 << (size - 1).bit_length())
        with self._lock:
            over = [self._aside.popleft()[1] for until, _ in list(self._aside) if until < time.monotonic()]
        for buffer in over:
            self.give(buffer)
        with self._lock:
            if free := self._free.get(whole):
                self._kept -= whole
                return free.pop()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        buffer = mmap.mmap(-1, whole, flags=flags)
        self._made(buffer)
        return buffer

    def give(self, buffer: mmap.mmap) -> None:
        with self._lock:
            if self._kept + len(buffer) <= KEPT_BYTES:
                self._kept += len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)
                return
        self._dropped(buffer)

    @contextmanager
    def filling(self, buffer: mmap.mmap) -> Iterator[None]:
        """Within it, whatever is raised also gives the buffer back."""
        try:
            yield
        except BaseException:
            self.give(buffer)
            raise

    def set_aside(self, buffer: mmap.mmap) -> None:
        """Give back a buffer of a transfer that failed, which may not have ended."""
        with self._lock:
            self._aside.append((time.monotonic() + ASIDE_SECONDS, buffer))


class Line:
    """The thread that fetches from one producer; once a fetch has failed, it is not used again."""

    def __init__(
        self,
        pool: bytes,
        source: Source,
        buffers: Buffers,
        landed: Callable[[Fetch, Fetched], None],
        failed: Callable[[Line], None],
    ) -> None:
        """Called in the line's thread: `landed`, with what became of a fetch; `failed`, when it may be asked for no
        more, before it gives up the fetches that it still has."""
        self.pool = pool
        self._source = source
        self._buffers = buffers
        self._landed = landed
        self._failed = failed
        self._asked: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="segue-fetch", daemon=True)
        self._thread.start()

    def ask(self, fetch: Fetch) -> None:
        self._asked.put(fetch)

    def hung_up(self) -> bool:
        """Whether the producer has probably ended."""
        return self._source.hung_up()

    def end(self) -> None:
        """End the thread when it has done what it was asked."""
        self._asked.put(None)

    def close(self) -> None:
        """Let the thread end; fetches that are not done never land."""
        self._closing = True
        self._source.interrupt()
        self._asked.put(None)

    def ended(self, seconds: float) -> bool:
        """Wait for the end of the thread. Return false if it still waits for its producer."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (fetch := self._asked.get()) is not None:
            if self._closing:
                continue
            if fetch.given_up:
                self._landed(fetch, Gone("its request was released"))
                continue
            try:
                found = self._source.fetch(fetch.place, self._buffers)
            except (SourceLost, OSError, PayloadError) as error:
                self._give_up(fetch, Gone(f"the fetch from {self._source.name} failed: {error}"))
                break
            except Exception as error:  # of any kind: without an answer the request would wait for ever
                log.exception("a fetch from %s failed", self._source.name)
                self._give_up(
                    fetch, Gone(f"the fetch from {self._source.name} failed: {type(error).__name__}: {error}")
                )
                break
            if isinstance(found, Taken):
                fetch.buffer = found.buffer
                self._landed(fetch, Arrived(found.payload, found.nbytes))
            else:
                self._landed(fetch, found)
        self._source.close()

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


@dataclass(frozen=True, slots=True)
class _Inline:
    """The place of a payload that came in its metadata."""

    pool: bytes
    number: int


class Consumer:
    """The payloads that one worker fetches, or has taken. Thread-safe."""

    def __init__(self, connect: Callable[[Any], Source], buffers: Buffers) -> None:
        """`connect` makes the source of a place, without waiting for anything."""
        self._connect = connect
        self._lock = threading.Lock()
        self._lines: dict[bytes, Line] = {}
        self._buffers = buffers
        self._fetches: dict[str, dict[tuple[bytes, int], Fetch]] = {}
        """Request → payload → its fetch, until the release; what was taken stays as `Gone`."""

    def fetch(self, place: Place, request_id: str, wake: Callable[[], None]) -> Fetched:
        """As `Connector.fetch`."""
        key = (place.pool, place.number)
        with self._lock:
            fetches = self._fetches.setdefault(request_id, {})
            fetch = fetches.get(key)
            if fetch is None:
                fetch = fetches[key] = Fetch(place, wake, Coming())
                self._line(place).ask(fetch)
            found = fetch.found
            if isinstance(found, Arrived):
                fetch.found = Gone("it was taken before")
            return found

    def taken_inline(self, request_id: str, pool: bytes, number: int) -> bool:
        """Record that a payload in metadata was taken; false if it was taken before."""
        key = (pool, -number)  # those that are not in metadata are counted apart
        with self._lock:
            fetches = self._fetches.setdefault(request_id, {})
            if key in fetches:
                return False
            fetches[key] = Fetch(_Inline(*key), lambda: None, Gone("it was taken before"))
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
                self._give_back(fetch)
                fetch.found = Gone("it was released")
            if key is None:
                self._fetches.pop(request_id, None)

    def close(self) -> bool:
        """Disconnect from every producer. Return false if some thread still waits for one."""
        with self._lock:
            lines, self._lines = self._lines, {}
            self._fetches.clear()
        for line in lines.values():
            line.close()
        end = time.monotonic() + CLOSE_SECONDS
        return not sum(not line.ended(max(0.0, end - time.monotonic())) for line in lines.values())

    def _line(self, place: Place) -> Line:
        line = self._lines.get(place.pool)
        if line is None:
            for other in [other for other in self._lines.values() if other.hung_up()]:
                del self._lines[other.pool]
                other.end()
            line = Line(place.pool, self._connect(place), self._buffers, self._landed, self._failed)
            self._lines[place.pool] = line
        return line

    def _failed(self, line: Line) -> None:
        with self._lock:
            if self._lines.get(line.pool) is line:
                del self._lines[line.pool]

    def _landed(self, fetch: Fetch, found: Fetched) -> None:
        with self._lock:
            if fetch.given_up:
                self._give_back(fetch)
                return
            fetch.found = found
        fetch.wake()

    def _give_back(self, fetch: Fetch) -> None:
        if fetch.buffer is not None:
            self._buffers.give(fetch.buffer)
            fetch.buffer = None
