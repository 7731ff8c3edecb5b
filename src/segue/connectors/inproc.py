"""The in-process connector passes references: for fused stages, and as a fake of the other connectors in tests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from segue.connectors.base import Arrived, Gone, Payload, Reach
from segue.connectors.payload import PayloadError, measure
from segue.messages.errors import ConfigError, StageFailed


@dataclass(slots=True)
class _Held:
    payload: Payload | None
    """None once it has been taken; its bytes count until the release."""
    size: int


class InProcessConnector:
    """`Connector` within one process; producer and consumer share the object. Thread-safe.

    The consumer gets the producer's own tensors and containers: neither side may change them after `put`. Allowed
    types, byte counts and refusals are the same as between processes. `max_bytes` bounds the payloads that are put and
    not released.
    """

    reach: Reach = "process"

    def __init__(self, *, max_bytes: int = 1 << 30) -> None:
        if max_bytes < 1:
            raise ConfigError(f"max_bytes is {max_bytes}; it must be at least 1", field="max_bytes")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._requests: dict[str, dict[int, _Held]] = {}
        self._in_use = 0
        self._closed = False

    def put(
        self, from_stage: str, to_stage: str, request_id: str, payload: Payload
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Return (ok, bytes, metadata); not ok if it exceeds `max_bytes` now. Raises like `SharedMemoryConnector`."""
        size = measure(payload).size
        if size > self._max_bytes:
            raise StageFailed(
                f"a payload from {from_stage!r} to {to_stage!r} has {size} bytes; the connector's max_bytes is "
                f"{self._max_bytes}",
                field="max_bytes",
                stage=from_stage,
            )
        with self._lock:
            self._check_open()
            if self._in_use + size > self._max_bytes:
                return False, size, None
            number = next(self._numbers)
            self._requests.setdefault(request_id, {})[number] = _Held(payload, size)
            self._in_use += size
        return True, size, {"kind": "inproc", "number": number}

    def fetch(
        self,
        from_stage: str,
        to_stage: str,
        request_id: str,
        metadata: dict[str, Any] | None,
        wake: Callable[[], None],
    ) -> Arrived | Gone:
        """Take a payload; see `Connector`. `wake` is never called."""
        match metadata:
            case {"kind": "inproc", "number": int(number)}:
                pass
            case _:
                raise PayloadError(
                    f"the payload from {from_stage!r} to {to_stage!r} came with broken metadata: {metadata!r:.80}",
                    field="metadata",
                )
        with self._lock:
            self._check_open()
            held = self._requests.get(request_id, {}).get(number)
            if held is None or held.payload is None:
                return Gone("it was released or taken before")
            payload, held.payload = held.payload, None
            return Arrived(payload, held.size)

    def release(self, request_id: str, metadata: dict[str, Any] | None = None) -> None:
        """Free all payloads of the request, taken or not; with the metadata of one payload, only that one."""
        with self._lock:
            self._check_open()
            held = self._requests.get(request_id, {})
            for number in list(held) if metadata is None else [metadata.get("number")]:
                if number in held:
                    self._in_use -= held.pop(number).size
            if not held:
                self._requests.pop(request_id, None)

    def close(self) -> None:
        """Free everything; further calls are errors."""
        with self._lock:
            self._closed = True
            self._requests.clear()
            self._in_use = 0

    @property
    def bytes_in_use(self) -> int:
        """Bytes of payloads that are put and not released."""
        with self._lock:
            return self._in_use

    def _check_open(self) -> None:
        if self._closed:
            raise StageFailed("the in-process connector is closed")
