"""The connector contract: move a payload from one worker to another."""

from __future__ import annotations

from typing import Any, Protocol

Payload = dict[str, Any]
"""Nested dicts, lists and tuples of tensors, bytes, numbers, strings and None."""


class Connector(Protocol):
    """Four calls. `put` runs in the producer's process, `get` in the consumer's; the metadata travels between them as
    a control message (msgpack-able: dict, list, str, bytes, int, float, bool, None)."""

    @property
    def bytes_in_use(self) -> int:
        """Memory of this side's pool that payloads occupy."""

    def put(
        self, from_stage: str, to_stage: str, request_id: str, payload: Payload
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """(ok, bytes of payload, metadata). Not ok, without metadata: no room now, try again after a release."""

    def get(
        self, from_stage: str, to_stage: str, request_id: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Payload, int] | None:
        """(payload, bytes), or None where it is gone (producer died, request released). Each metadata is taken once.

        Tensors may be views of shared memory: they stay valid until `release(request_id)` on this side.
        """

    def release(self, request_id: str, metadata: dict[str, Any] | None = None) -> None:
        """Free what this side holds for the request: as producer what nobody has taken, as consumer what it has taken.

        With the metadata of one payload, only that one: so a consumer frees each chunk when it is done with it.
        """

    def close(self) -> None:
        """Free everything; further calls are errors."""
