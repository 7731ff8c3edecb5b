"""Responses that are kept, in memory and within bounds: to be asked for again, and gone on from."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, NotFound, Overloaded, TooLarge, shown
from segue.server.errors import StorageFull, Unsupported
from segue.server.response_journal import Journal

RUNNING = ("queued", "in_progress")
"""Statuses of a response that is being made."""
_WHOLE = ("completed", "incomplete")
"""Statuses of a response that can be gone on from."""


@dataclass(slots=True)
class Turn:
    """What a response added to its conversation."""

    inputs: bytes
    """A JSON list of items."""
    outputs: bytes
    before: Turn | None
    holders: int = 0
    """Responses and later turns that need it; it is given up with the last one."""

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.inputs) + len(self.outputs)


@dataclass(slots=True)
class _Kept:
    response: bytes
    status: str
    turn: Turn
    background: bool = False
    journal: Journal | None = None
    """Of one that was made in the background, until its room is needed."""
    working: int = 0
    """Bytes that the stages are given, while it is made."""

    @property
    def size(self) -> int:
        """Bytes, without the turn's."""
        return len(self.response) + self.working + (self.journal.size if self.journal is not None else 0)


class ResponseStore:
    """The oldest make room for new ones, but for those that are being made. A conversation whose earlier responses are
    gone can still be gone on from."""

    def __init__(self, most: int, most_bytes: int) -> None:
        """At most so many responses, and bytes of JSON of them, their conversations and events."""
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.size = 0
        """Bytes that are kept."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._kept

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, response: dict[str, Any], inputs: bytes, before: Turn | None) -> None:
        """Keep a response that was given for `inputs` (a JSON list of items), after the turn `before`."""
        turn = Turn(inputs, msgspec.json.encode(response["output"]), before)
        self._put(response["id"], _Kept(msgspec.json.encode(response), response["status"], turn))
        self._make_room()

    def begin(
        self, response: dict[str, Any], inputs: bytes, before: Turn | None, events: list[bytes], working: int
    ) -> Journal:
        """Keep a response that will be made in the background: it stays until it has ended, or is forgotten. Its
        events, of which these are the first, come with `add` and `end`.

        `working`: bytes of media that it holds meanwhile. Raises `TooLarge`; `Overloaded` where others that are being
        made leave no room.
        """
        journal = Journal()
        journal.add(events)
        turn = Turn(inputs, b"[]", before)
        kept = _Kept(msgspec.json.encode(response), response["status"], turn, True, journal, working)
        if (size := kept.size + kept.turn.size) > self._most_bytes:
            raise TooLarge(
                f"the response takes {size} bytes before it is made; at most {self._most_bytes} are kept "
                "(max_response_bytes): leave background out"
            )
        self._put(response["id"], kept)
        if not self._make_room():
            self.forget(response["id"])
            raise Overloaded(
                f"the responses that are being made leave no room for another (this server keeps {self._most}, and "
                f"{self._most_bytes} bytes of them); try again later"
            )
        return journal

    def add(self, response_id: str, events: list[bytes], response: dict[str, Any] | None) -> None:
        """One that was begun goes on; `response`: as it stands now, where more than its events has changed. Raises
        `StorageFull` where there is no room, and nothing to give up for it."""
        self._write(response_id, events, response, last=False)
        if not self._make_room():
            raise StorageFull(
                f"the responses that are being made have grown to more than {self._most_bytes} bytes "
                "(max_response_bytes)"
            )

    def end(self, response: dict[str, Any], events: list[bytes]) -> None:
        """One that was begun has ended, with these last events. Where all others leave too little room, its events
        are given up, then itself."""
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
        """Raises `NotFound`."""
        kept = self._found(response_id, "response_id")
        del self._kept[response_id]
        self.size -= kept.size
        self._release(kept.turn)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def response(self, response_id: str) -> bytes:
        """Its JSON, as it stands. Raises `NotFound`."""
        return self._found(response_id, "response_id").response

    def of_background(self, response_id: str) -> bool:
        """Whether it was begun. Raises `NotFound`."""
        return self._found(response_id, "response_id").background

    def journal(self, response_id: str) -> Journal:
        """Its events. Raises `NotFound`, `Unsupported` where they are not kept."""
        if (journal := self._found(response_id, "response_id").journal) is None:
            raise Unsupported(
                "stream is true; events are kept of responses that are made in the background, as long as there is "
                "room: leave it out to get the response",
                field="stream",
            )
        return journal

    def inputs(self, response_id: str) -> tuple[Turn | None, bytes]:
        """(the conversation before it, the items that came with it, a JSON list). Raises `NotFound`."""
        turn = self._found(response_id, "response_id").turn
        return turn.before, turn.inputs

    def turn(self, response_id: str) -> Turn:
        """To go on from. Raises `NotFound`; `InvalidRequest` where there is nothing to go on from (yet)."""
        kept = self._found(response_id, "previous_response_id")
        if kept.status not in _WHOLE:
            raise InvalidRequest(
                f"previous_response_id is {shown(response_id)}, whose status is {kept.status}; only what is "
                f"{' or '.join(_WHOLE)} can be gone on from",
                field="previous_response_id",
            )
        return kept.turn

    # ── the books ──────────────────────────────────────────────────────────────────────────────────────────────────

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
        """Whether all fits, once the oldest that have ended (but for `spare`) were forgotten."""
        while len(self._kept) > self._most or self.size > self._most_bytes:
            ended = (name for name, one in self._kept.items() if one.status not in RUNNING and one is not spare)
            if (oldest := next(ended, None)) is None:
                return False
            self.forget(oldest)
        return True

    def _found(self, response_id: str, field: str) -> _Kept:
        if (kept := self._kept.get(response_id)) is None:
            raise NotFound(
                f"{field} is {shown(response_id)}; no such response is kept here: it never was, or has made room for "
                f"newer ones (this server keeps {self._most}, in memory)",
                field=field,
            )
        return kept

    def _hold(self, turn: Turn) -> None:
        """Once more. A turn that was given up meanwhile is held again, with those before it."""
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
    """The conversation up to and with a turn."""
    turns: list[Turn] = []
    while turn is not None:
        turns.append(turn)
        turn = turn.before
    parts = [part for one in reversed(turns) for part in (one.inputs, one.outputs)]
    return [item for part in parts for item in msgspec.json.decode(part)]
