"""Stores responses in memory, within limits, so that clients can fetch and continue them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, NotFound, Overloaded, TooLarge, shown
from segue.server.http.errors import StorageFull, Unsupported
from segue.server.openai.responses.journal import Journal

RUNNING = ("queued", "in_progress")
"""Statuses of an unfinished response."""
_WHOLE = ("completed", "incomplete")
"""Statuses of a response that can be continued."""


@dataclass(slots=True)
class Turn:
    """The items that a response added to its conversation."""

    inputs: bytes
    """A JSON list of items."""
    outputs: bytes
    before: Turn | None
    holders: int = 0
    """Responses and later turns that refer to it; it is dropped with the last reference."""

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.inputs) + len(self.outputs)


@dataclass(slots=True)
class _Kept:
    response: bytes
    status: str
    turn: Turn
    owner: str = ""
    """The tenant whose key created it."""
    background: bool = False
    journal: Journal | None = None
    """Of a background response, until its space is needed."""
    working: int = 0
    """Bytes of input media while it is being made."""

    @property
    def size(self) -> int:
        """Bytes, without those of the turn."""
        return len(self.response) + self.working + (self.journal.size if self.journal is not None else 0)


class ResponseStore:
    """Stored responses. The oldest finished ones are dropped first, unfinished ones never. A conversation can continue
    after its earlier responses were dropped."""

    def __init__(self, most: int, most_bytes: int) -> None:
        """`most`: responses; `most_bytes`: JSON of responses, their conversations and events."""
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.size = 0
        """Bytes stored."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._kept

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, response: dict[str, Any], inputs: bytes, before: Turn | None, owner: str = "") -> None:
        """Store an owner's response to `inputs` (a JSON list of items), after the turn `before`."""
        turn = Turn(inputs, msgspec.json.encode(response["output"]), before)
        self._put(response["id"], _Kept(msgspec.json.encode(response), response["status"], turn, owner))
        self._make_room()

    def begin(
        self,
        response: dict[str, Any],
        inputs: bytes,
        before: Turn | None,
        events: list[bytes],
        working: int,
        owner: str = "",
    ) -> Journal:
        """Store a background response, which stays until it has ended or is deleted. `add` and `end` append events to
        the given first ones.

        `working`: bytes of media that it holds meanwhile. Raises `TooLarge`; `Overloaded` if unfinished responses leave
        no space.
        """
        journal = Journal()
        journal.add(events)
        turn = Turn(inputs, b"[]", before)
        kept = _Kept(msgspec.json.encode(response), response["status"], turn, owner, True, journal, working)
        if (size := kept.size + kept.turn.size) > self._most_bytes:
            raise TooLarge(
                f"the response takes {size} bytes before it is made; at most {self._most_bytes} are stored "
                "(max_response_bytes): leave background out",
            )
        self._put(response["id"], kept)
        if not self._make_room():
            self.forget(response["id"])
            raise Overloaded(
                f"unfinished responses leave no space for another (this server stores {self._most}, and "
                f"{self._most_bytes} bytes of them); try again later",
            )
        return journal

    def add(self, response_id: str, events: list[bytes], response: dict[str, Any] | None) -> None:
        """Append events of an unfinished response. `response`: its new state, if more than its events changed. Raises
        `StorageFull` if there is no space and nothing to drop."""
        self._write(response_id, events, response, last=False)
        if not self._make_room():
            raise StorageFull(
                f"unfinished responses have grown to more than {self._most_bytes} bytes (max_response_bytes)"
            )

    def end(self, response: dict[str, Any], events: list[bytes]) -> None:
        """Finish a response with these last events. If the others leave too little space, its events are dropped, then
        the response itself."""
        kept = self._write(response["id"], events, response, last=True)
        self.size -= kept.working + kept.turn.size
        kept.working = 0
        kept.turn.outputs = msgspec.json.encode(response["output"])
        self.size += kept.turn.size
        if not self._make_room(spare=kept) and kept.journal is not None:
            self.size -= kept.journal.size
            kept.journal = None
        self._make_room()

    def forget(self, response_id: str) -> None:
        """Delete a response. Raises `NotFound`."""
        kept = self._found(response_id, "response_id")
        del self._kept[response_id]
        self.size -= kept.size
        self._release(kept.turn)

    def check_owner(self, response_id: str, owner: str, field: str = "response_id") -> None:
        """Raise `NotFound` for a response of another owner, as if it did not exist."""
        if response_id not in self._kept or self._kept[response_id].owner != owner:
            raise self._not_there(response_id, field)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def response(self, response_id: str) -> bytes:
        """Its JSON in its current state. Raises `NotFound`."""
        return self._found(response_id, "response_id").response

    def of_background(self, response_id: str) -> bool:
        """Whether it was made in the background. Raises `NotFound`."""
        return self._found(response_id, "response_id").background

    def journal(self, response_id: str) -> Journal:
        """Its events. Raises `NotFound`, or `Unsupported` if they are not stored."""
        if (journal := self._found(response_id, "response_id").journal) is None:
            raise Unsupported(
                "stream is true, but the server stores events only of background responses, while there is "
                "space: leave it out to get the response",
                field="stream",
            )
        return journal

    def inputs(self, response_id: str) -> tuple[Turn | None, bytes]:
        """(the conversation before it, its own items as a JSON list). Raises `NotFound`."""
        turn = self._found(response_id, "response_id").turn
        return turn.before, turn.inputs

    def turn(self, response_id: str) -> Turn:
        """The turn to continue from. Raises `NotFound`; `InvalidRequest` if the response cannot be continued (yet)."""
        kept = self._found(response_id, "previous_response_id")
        if kept.status not in _WHOLE:
            raise InvalidRequest(
                f"previous_response_id is {shown(response_id)}, whose status is {kept.status}; only responses that are "
                f"{' or '.join(_WHOLE)} can be continued",
                field="previous_response_id",
            )
        return kept.turn

    # ── accounting ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _put(self, response_id: str, kept: _Kept) -> None:
        self._kept[response_id] = kept
        self.size += kept.size
        self._hold(kept.turn)

    def _write(self, response_id: str, events: list[bytes], response: dict[str, Any] | None, *, last: bool) -> _Kept:
        kept = self._kept[response_id]
        self.size -= kept.size
        if response is not None:
            kept.response, kept.status = msgspec.json.encode(response), response["status"]
        assert kept.journal is not None
        kept.journal.add(events, last=last)
        self.size += kept.size
        return kept

    def _make_room(self, spare: _Kept | None = None) -> bool:
        """Drop the oldest finished responses (except `spare`) and return whether all fits."""
        while len(self._kept) > self._most or self.size > self._most_bytes:
            ended = (name for name, one in self._kept.items() if one.status not in RUNNING and one is not spare)
            if (oldest := next(ended, None)) is None:
                return False
            self.forget(oldest)
        return True

    def _found(self, response_id: str, field: str) -> _Kept:
        if (kept := self._kept.get(response_id)) is None:
            raise self._not_there(response_id, field)
        return kept

    def _not_there(self, response_id: str, field: str) -> NotFound:
        return NotFound(
            f"{field} is {shown(response_id)}, which is not stored here: it never was, or was dropped for "
            f"newer ones (this server stores {self._most}, in memory)",
            field=field,
        )

    def _hold(self, turn: Turn) -> None:
        """Add a reference. A turn dropped meanwhile is stored again, with those before it."""
        one: Turn | None = turn
        while one is not None:
            one.holders += 1
            if one.holders > 1:
                return
            self.size += one.size
            one = one.before

    def _release(self, turn: Turn) -> None:
        one: Turn | None = turn
        while one is not None:
            one.holders -= 1
            if one.holders:
                return
            self.size -= one.size
            one = one.before


def items_so_far(turn: Turn | None) -> list[Any]:
    """The items of the conversation up to and including a turn."""
    turns: list[Turn] = []
    while turn is not None:
        turns.append(turn)
        turn = turn.before
    parts = [part for one in reversed(turns) for part in (one.inputs, one.outputs)]
    return [item for part in parts for item in msgspec.json.decode(part)]
