"""The connector contract: move a payload from one worker to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Payload = dict[str, Any]
"""Nested dicts, lists and tuples of tensors, bytes, numbers, strings and None."""

Reach = Literal["process", "host", "network"]
"""How far apart the two ends of an edge may be: in one process, on one host, on hosts that a network joins."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A payload that the consumer has now."""

    payload: Payload
    nbytes: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A payload that nobody will ever get with these metadata."""

    reason: str
    """E.g. "its producer died"."""


@dataclass(frozen=True, slots=True)
class Coming:
    """A payload that is on its way."""


Fetched = Arrived | Gone | Coming


class Connector(Protocol):
    """Moves payloads by four calls. `put` runs in the producer's process, `fetch` in the consumer's; the metadata
    travel between them in a control message (msgpack types: dict, list, str, bytes, int, float, bool, None)."""

    @property
    def reach(self) -> Reach:
        """How far apart producer and consumer may be."""

    @property
    def bytes_in_use(self) -> int:
        """Bytes of this side's pool that payloads occupy."""

    def put(
        self, from_stage: str, to_stage: str, request_id: str, payload: Payload
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Send a payload; return (ok, bytes, metadata). Not ok, no metadata: no space now, retry after a release."""

    def fetch(
        self,
        from_stage: str,
        to_stage: str,
        request_id: str,
        metadata: dict[str, Any] | None,
        wake: Callable[[], None],
    ) -> Fetched:
        """Take a payload, without waiting for it. Metadata bring it once; after that it is gone.

        `Coming`: the first call has started the transfer; `wake` is called, from any thread, when the same call will
        give another answer, and may be called more often. Only a connector of reach `network` answers so.
        `Gone`: it was taken before, its request was released, or its producer died.

        Tensors may be views of shared memory: they stay valid until `release(request_id)` on this side.
        Raises `PayloadError` for metadata that no `put` has returned.
        """

    def release(self, request_id: str, metadata: dict[str, Any] | None = None) -> None:
        """Free the request's payloads on this side: a producer's that nobody has taken, a consumer's that it has taken
        or that are on their way to it.

        With the metadata of one payload, free only that one: so a consumer frees each chunk when it is done with it.
        """

    def close(self) -> None:
        """Free everything; further calls are errors."""
