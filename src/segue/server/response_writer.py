"""Deltas of a generation → the events of a response, and the response itself."""

from __future__ import annotations

import time
from typing import Any

from segue.messages.deltas import Delta, Finished, TextDelta
from segue.messages.errors import SegueError
from segue.models.dialects.pieces import CallBegun, Piece, Said, Thought
from segue.server.accounts import usage_object
from segue.server.chat_logprobs import logprobs_object
from segue.server.reply_reader import ReplyReader, call_id
from segue.server.response_output import Call, Event, Item, Text
from segue.server.response_request import ResponsesRequest

_FAILURES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""HTTP status → OpenAI's `error.code` of a response that failed; others are `server_error`."""


class ResponseWriter:
    """Writes one response."""

    def __init__(self, asked: ResponsesRequest) -> None:
        self._asked = asked
        self._reader = ReplyReader(asked.chat)
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._item: Item | None = None
        self._kind: type[Piece] | None = None
        """Of what the open item holds."""
        self._logprobs: list[Any] = []
        """Of tokens whose text is held back."""
        self.response = self._response("in_progress")
        """As it stands."""

    def begin(self) -> list[Event]:
        """The first events."""
        return self._standing("in_progress", "created", "in_progress")

    def queue(self) -> list[Event]:
        """The first events of what is made in the background; those of `leave_queue` come next."""
        return self._standing("queued", "created", "queued")

    def leave_queue(self) -> list[Event]:
        """It is being made."""
        return self._standing("in_progress", "in_progress")

    def take(self, delta: Delta) -> list[Event]:
        """What a delta adds; the last one ends the response."""
        events: list[Event] = []
        if isinstance(delta, TextDelta):
            if delta.logprobs and self._asked.chat.wants_logprobs:
                self._logprobs += logprobs_object(delta.logprobs, as_ids=False)["content"]
            events = self._written(self._reader.feed(delta.text, len(delta.token_ids)))
        elif isinstance(delta, Finished):
            events = self._written(self._reader.finish())
            cut = delta.finish_reason == "length"
            status = "incomplete" if cut else "completed"
            if self._item is None and not self._output:  # there always is something to read
                events += self._opened(Text(0, thought=False), Said)
            events += self._closed(status)
            self.response = self._response(status, delta)
            events.append({"type": f"response.{status}", "response": self.response})
        return self._numbered(events)

    def cancel(self) -> list[Event]:
        """The last events of a response that is not to be made any more."""
        events = self._closed("incomplete")
        self.response = self._response("cancelled")
        return self._numbered([*events, {"type": "response.cancelled", "response": self.response}])

    def fail(self, error: SegueError) -> list[Event]:
        """The last events of a response that has begun."""
        events = self._closed("incomplete")
        code = _FAILURES.get(error.status, "server_error")
        self.response = {**self._response("failed"), "error": {"code": code, "message": error.message}}
        return self._numbered([*events, {"type": "response.failed", "response": self.response}])

    def _standing(self, status: str, *kinds: str) -> list[Event]:
        self.response = self._response(status)
        return self._numbered([{"type": f"response.{kind}", "response": self.response} for kind in kinds])

    def _written(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, CallBegun):
                item = Call(self._next(), piece, call_id(self._asked.chat))
                events += self._closed("completed") + self._opened(item, CallBegun)
                continue
            if isinstance(piece, Said | Thought) and self._kind is not type(piece):
                events += self._closed("completed")
                events += self._opened(Text(self._next(), thought=isinstance(piece, Thought)), type(piece))
            assert self._item is not None, "arguments come after the call has begun"
            logprobs, self._logprobs = self._logprobs, []
            events.append(self._item.add(piece.text, logprobs))
        return events

    def _next(self) -> int:
        """Place of the next item: the open one, if any, is closed first."""
        return len(self._output) + (self._item is not None)

    def _opened(self, item: Item, kind: type[Piece]) -> list[Event]:
        self._item, self._kind = item, kind
        return item.begin()

    def _closed(self, status: str) -> list[Event]:
        if self._item is None:
            return []
        events, done = self._item.end(status)
        self._output.append(done)
        self._item = self._kind = None
        self.response = self._response("in_progress")
        return events

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._sequence
            self._sequence += 1
        return events

    def _response(self, status: str, end: Finished | None = None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._asked.response_id,
            "object": "response",
            "created_at": self._asked.chat.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self._asked.chat.model,
            "output": list(self._output),
            "usage": None if end is None else self._usage(end),
            **self._asked.asked,
        }

    def _usage(self, end: Finished) -> dict[str, Any]:
        usage = usage_object([end], thought_tokens=self._reader.thought_tokens)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
