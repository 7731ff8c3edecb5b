"""Responses that are kept, in memory and within bounds: to be asked for again, and gone on from."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.media.sources import shown
from segue.messages.errors import NotFound


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


@dataclass(frozen=True, slots=True)
class _Kept:
    response: bytes
    turn: Turn


class ResponseStore:
    """The oldest make room for new ones. A conversation whose earlier responses are gone can still be gone on from."""

    def __init__(self, most: int, most_bytes: int) -> None:
        """At most so many responses, and bytes of JSON of them and their conversations."""
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.size = 0
        """Bytes that are kept."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._kept

    def keep(self, response: dict[str, Any], inputs: bytes, before: Turn | None) -> None:
        """Keep a response that was given for `inputs` (a JSON list of items), after the turn `before`."""
        turn = Turn(inputs, msgspec.json.encode(response["output"]), before)
        kept = _Kept(msgspec.json.encode(response), turn)
        self._kept[response["id"]] = kept
        self.size += len(kept.response)
        self._hold(turn)
        while self._kept and (len(self._kept) > self._most or self.size > self._most_bytes):
            self.forget(next(iter(self._kept)))

    def response(self, response_id: str) -> bytes:
        """Its JSON. Raises `NotFound`."""
        return self._found(response_id, "response_id").response

    def turn(self, response_id: str) -> Turn:
        """To go on from. Raises `NotFound`."""
        return self._found(response_id, "previous_response_id").turn

    def forget(self, response_id: str) -> None:
        """Raises `NotFound`."""
        kept = self._found(response_id, "response_id")
        del self._kept[response_id]
        self.size -= len(kept.response)
        self._release(kept.turn)

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
