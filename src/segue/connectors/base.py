"""The connector contract: move a payload from one worker to another."""

from __future__ import annotations

from typing import Any, Protocol

Payload = dict[str, Any]
"""Nested dicts, lists and tuples of tensors, bytes, numbers, strings and None."""


class Connector(Protocol):
    """Moves payloads by four calls. `put` runs in the producer's process, `get` in the consumer's; the metadata travel
    between them in a control message (msgpack types: dict, list, str, bytes, int, float, bool, None)."""

    @property
    def bytes_in_use(self) -> int:
        """Bytes of this side's pool that payloads occupy."""

    def put(
        self, from_stage: str, to_stage: str, request_id: str, payload: Payload
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Send a payload; return (ok, bytes, metadata). Not ok, no metadata: no space now, retry after a release."""

    def get(
        self, from_stage: str, to_stage: str, request_id: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Payload, int] | None:
        """Return (payload, bytes), or None if it is gone (producer died, request released). Metadata work only once.

        Tensors may be views of shared memory: they stay valid until `release(request_id)` on this side.
        """

    def release(self, request_id: str, metadata: dict[str, Any] | None = None) -> None:
        """Free the request's payloads on this side: a producer's that nobody has taken, a consumer's that it has taken.

        With the metadata of one payload, free only that one: so a consumer frees each chunk when it is done with it.
        """

    def close(self) -> None:
        """Free everything; further calls are errors."""
