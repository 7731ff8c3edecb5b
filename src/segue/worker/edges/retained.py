"""Keep payloads until the downstream stage has finished with them, so that it can restart elsewhere.

Memory is bounded: excess payloads go to an unlinked file (which no crash leaves behind), oldest request first. If the
file cannot be written either (disk full), the request continues without retained payloads: if its downstream stage
then dies, this stage itself is run again.
"""

from __future__ import annotations

import io
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from segue.connectors import payload as codec
from segue.connectors.base import Payload

log = logging.getLogger(__name__)

Key = tuple[str, str, str]
"""request, source stage, target stage"""


@dataclass(slots=True)
class _Item:
    payload: Payload | None
    """None and `offset` < 0: a chunk without payload; None and `offset` ≥ 0: the payload is in the file."""
    final: bool
    offset: int = -1
    length: int = 0


@dataclass(slots=True)
class _Stream:
    items: list[_Item] = field(default_factory=list)
    in_memory: int = 0
    whole: bool = True
    file: io.BufferedRandom | None = None


class RetainedStore:
    """The retained chunks of every stream that leaves this worker."""

    def __init__(self, limit_bytes: int, spill_dir: str) -> None:
        self._limit = limit_bytes
        self._spill_dir = spill_dir
        self._streams: dict[Key, _Stream] = {}
        self.in_memory = 0
        self.spilled = 0

    def append(self, key: Key, payload: Payload | None, nbytes: int, *, final: bool) -> None:
        """Keep one chunk. `nbytes`: its size in memory."""
        stream = self._streams.setdefault(key, _Stream())
        if not stream.whole:
            return
        stream.items.append(_Item(payload, final))
        stream.in_memory += nbytes
        self.in_memory += nbytes
        if self.in_memory > self._limit:
            self._make_room()

    def replay(self, key: Key) -> Iterator[tuple[Payload | None, bool]] | None:
        """Return all chunks of a stream from the first, as (payload, final); None if some could not be kept."""
        stream = self._streams.get(key, _Stream())
        return self._read(stream) if stream.whole else None

    def drop(self, key: Key) -> None:
        """Free a stream that the downstream stage has finished with."""
        stream = self._streams.pop(key, None)
        if stream is None:
            return
        self.in_memory -= stream.in_memory
        if stream.file is not None:
            self.spilled -= sum(item.length for item in stream.items)
            stream.file.close()

    def drop_request(self, request_id: str) -> None:
        for key in [key for key in self._streams if key[0] == request_id]:
            self.drop(key)

    def close(self) -> None:
        """Free everything."""
        for key in list(self._streams):
            self.drop(key)

    def _read(self, stream: _Stream) -> Iterator[tuple[Payload | None, bool]]:
        for item in list(stream.items):
            if item.offset < 0:
                yield item.payload, item.final
            else:
                assert stream.file is not None
                data = bytearray(item.length)
                stream.file.seek(item.offset)
                stream.file.readinto(data)
                yield codec.read_from(memoryview(data)), item.final

    def _make_room(self) -> None:
        for stream in list(self._streams.values()):  # insertion order: the oldest first
            if self.in_memory <= self._limit:
                return
            if stream.in_memory:
                self._spill(stream)

    def _spill(self, stream: _Stream) -> None:
        try:
            if stream.file is None:
                stream.file = tempfile.TemporaryFile(dir=self._spill_dir)  # noqa: SIM115  lives with the stream
            stream.file.seek(0, os.SEEK_END)
            for item in stream.items:
                if item.payload is None:
                    continue
                encoded = codec.measure(item.payload)
                data = bytearray(encoded.size)
                encoded.write_into(memoryview(data))
                item.offset, item.length = stream.file.tell(), len(data)
                stream.file.write(data)
                stream.file.flush()
                item.payload = None
                self.spilled += item.length
        except OSError as error:
            log.warning("cannot write retained payloads (%s): if the next stage dies, this stage must run again", error)
            stream.whole = False
            stream.items.clear()
        self.in_memory -= stream.in_memory
        stream.in_memory = 0
