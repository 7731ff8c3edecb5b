"""Fetch the payloads of chunks without waiting for them. Chunks of one stream are fed in order, but fetched side by
side; a stream is one edge of one request."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from segue.connectors.base import Arrived, Coming, Connector, Fetched, Gone
from segue.graph.parts import stage_of
from segue.messages.errors import StageFailed
from segue.messages.wire import Chunk

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    chunk: Chunk
    found: Fetched | None
    """None: the chunk has no payload."""


class Arrivals:
    """The chunks of a worker whose payload is coming, or that wait behind such a chunk."""

    def __init__(self, connectors: Mapping[tuple[str, str], Connector], wake: Callable[[], None]) -> None:
        """`connectors`: of the edges that lead to this worker. `wake`: makes it poll; any thread may call it."""
        self._connectors = connectors
        self._wake = wake
        self._woken = False
        self._streams: dict[tuple[str, str, str], deque[_Waiting]] = {}
        """(request, source stage, target stage) → its chunks from the first whose payload is coming."""

    def take(self, chunk: Chunk) -> Arrived | Gone | Coming | None:
        """Start to fetch a chunk. `Coming`: a later `poll` returns it; None: it has no payload."""
        stream = (chunk.request_id, chunk.source.stage, chunk.target)
        found = self._fetch(chunk)
        if stream not in self._streams and not isinstance(found, Coming):
            return found
        self._streams.setdefault(stream, deque()).append(_Waiting(chunk, found))
        return Coming()

    def poll(self) -> list[tuple[Chunk, Arrived | Gone | None]]:
        """Return the chunks that can be fed now, in order, with their payloads."""
        if not self._woken:
            return []
        self._woken = False
        landed: list[tuple[Chunk, Arrived | Gone | None]] = []
        for stream, waiting in list(self._streams.items()):
            for one in waiting:
                if isinstance(one.found, Coming):
                    one.found = self._fetch(one.chunk)
            while waiting and not isinstance(found := waiting[0].found, Coming):
                landed.append((waiting.popleft().chunk, found))
            if not waiting:
                del self._streams[stream]
        return landed

    def drop(self, request_id: str, target: str, source: str | None = None) -> None:
        """Free what is coming for a request in stage `target`, from every source or from one."""
        for stream in [key for key in self._streams if key[0] == request_id and key[2] == target]:
            if source is None or stream[1] == source:
                for one in self._streams.pop(stream):
                    self.refuse(one.chunk)

    def refuse(self, chunk: Chunk) -> None:
        """Free the payload of a chunk that is not wanted any more."""
        if chunk.meta is not None:
            self._connectors[_edge(chunk)].release(chunk.request_id, chunk.meta)

    def count(self) -> int:
        """Return the number of chunks that wait."""
        return sum(map(len, self._streams.values()))

    def _fetch(self, chunk: Chunk) -> Fetched | None:
        if chunk.meta is None:
            return None
        edge = _edge(chunk)
        try:
            found = self._connectors[edge].fetch(*edge, chunk.request_id, chunk.meta, self._wake_once)
        except StageFailed as error:  # bytes from another process: they cost this payload, never the worker
            found = Gone(error.message)
        if isinstance(found, Gone):
            log.warning("a payload from %r to %r is lost: %s", *edge, found.reason)
        return found

    def _wake_once(self) -> None:
        if not self._woken:
            self._woken = True
            self._wake()


def _edge(chunk: Chunk) -> tuple[str, str]:
    """The stages of a chunk's two ends, which may be visited several times."""
    return stage_of(chunk.source.stage), stage_of(chunk.target)
