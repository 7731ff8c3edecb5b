"""Converts the deltas of a generation to events of a response, and to the response itself.

Each output item produces its own events as it grows, and its final object.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Protocol

from segue.messages.deltas import Delta, Finished, TextDelta
from segue.messages.errors import SegueError
from segue.models.shared.dialects.pieces import CallBegun, ReplyPiece, Said, Thought
from segue.server.generation.usage import usage_object
from segue.server.openai.chat.reply import ReplyReader, call_id
from segue.server.openai.chat.request import logprobs_object
from segue.server.openai.responses.request import ResponsesRequest

Event = dict[str, Any]


class Item(Protocol):
    """One entry of `output`. Its events still lack the sequence number."""

    def begin(self) -> list[Event]:
        """The events that open the empty item."""
        ...

    def add(self, text: str, logprobs: list[Any]) -> Event:
        """The event for more text."""
        ...

    def end(self, status: str) -> tuple[list[Event], dict[str, Any]]:
        """(its last events, the finished item)."""
        ...


class Text:
    """The model's text or thought: an item with one part."""

    def __init__(self, index: int, *, thought: bool) -> None:
        kind = "reasoning" if thought else "message"
        own = f"{'rs' if thought else 'msg'}_{uuid.uuid4().hex}"
        about: dict[str, Any] = {"summary": []} if thought else {"role": "assistant"}
        self._item = {"id": own, "type": kind, **about}
        self._thought = thought
        self._event = "response.reasoning_text" if thought else "response.output_text"
        self._output_index = index
        self._at = {"item_id": own, "output_index": index, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def begin(self) -> list[Event]:
        item = {**self._item, "status": "in_progress", "content": []}
        return [
            {"type": "response.output_item.added", "output_index": self._output_index, "item": item},
            {"type": "response.content_part.added", **self._at, "part": self._part("", [])},
        ]

    def add(self, text: str, logprobs: list[Any]) -> Event:
        self._texts.append(text)
        self._logprobs += logprobs
        return {"type": f"{self._event}.delta", **self._at, "delta": text, **self._with(logprobs)}

    def end(self, status: str) -> tuple[list[Event], dict[str, Any]]:
        text = "".join(self._texts)
        part = self._part(text, self._logprobs)
        item = {**self._item, "status": status, "content": [part]}
        return [
            {"type": f"{self._event}.done", **self._at, "text": text, **self._with(self._logprobs)},
            {"type": "response.content_part.done", **self._at, "part": part},
            {"type": "response.output_item.done", "output_index": self._output_index, "item": item},
        ], item

    def _with(self, logprobs: list[Any]) -> dict[str, Any]:
        return {} if self._thought else {"logprobs": list(logprobs)}

    def _part(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        if self._thought:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


class Call:
    """A function call."""

    def __init__(self, index: int, begun: CallBegun, call_id: str) -> None:
        own = f"fc_{uuid.uuid4().hex}"
        self._item = {"id": own, "type": "function_call", "call_id": call_id, "name": begun.name}
        self._output_index = index
        self._at = {"item_id": own, "output_index": index}
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        item = {**self._item, "status": "in_progress", "arguments": ""}
        return [{"type": "response.output_item.added", "output_index": self._output_index, "item": item}]

    def add(self, text: str, logprobs: list[Any]) -> Event:
        self._texts.append(text)
        return {"type": "response.function_call_arguments.delta", **self._at, "delta": text}

    def end(self, status: str) -> tuple[list[Event], dict[str, Any]]:
        arguments = "".join(self._texts)
        item = {**self._item, "status": status, "arguments": arguments}
        done = {"type": "response.function_call_arguments.done", **self._at, "name": self._item["name"]}
        return [
            {**done, "arguments": arguments},
            {"type": "response.output_item.done", "output_index": self._output_index, "item": item},
        ], item


_FAILURES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""HTTP status → OpenAI's `error.code` of a failed response; others are `server_error`."""


class ResponseWriter:
    """Writes one response."""

    def __init__(self, asked: ResponsesRequest) -> None:
        self._asked = asked
        self._reader = ReplyReader(asked.chat)
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._item: Item | None = None
        self._kind: type[ReplyPiece] | None = None
        """Text of the open item so far."""
        self._logprobs: list[Any] = []
        """Log-probabilities of tokens whose text is held back."""
        self.response = self._response("in_progress")
        """The response in its current state."""

    def begin(self) -> list[Event]:
        """The first events."""
        return self._standing("in_progress", "created", "in_progress")

    def queue(self) -> list[Event]:
        """The first events of a background response; those of `leave_queue` follow."""
        return self._standing("queued", "created", "queued")

    def leave_queue(self) -> list[Event]:
        """The events at the start of the work."""
        return self._standing("in_progress", "in_progress")

    def take(self, delta: Delta) -> list[Event]:
        """The events of a delta; the last delta ends the response."""
        events: list[Event] = []
        if isinstance(delta, TextDelta):
            if delta.logprobs and self._asked.chat.wants_logprobs:
                self._logprobs += logprobs_object(delta.logprobs, as_ids=False)["content"]
            events = self._written(self._reader.feed(delta.text, len(delta.token_ids)))
        elif isinstance(delta, Finished):
            events = self._written(self._reader.finish())
            cut = delta.finish_reason == "length"
            status = "incomplete" if cut else "completed"
            if self._item is None and not self._output:  # clients expect at least one item
                events += self._opened(Text(0, thought=False), Said)
            events += self._closed(status)
            self.response = self._response(status, delta)
            events.append({"type": f"response.{status}", "response": self.response})
        return self._numbered(events)

    def cancel(self) -> list[Event]:
        """The last events of a cancelled response."""
        events = self._closed("incomplete")
        self.response = self._response("cancelled")
        return self._numbered([*events, {"type": "response.cancelled", "response": self.response}])

    def fail(self, error: SegueError) -> list[Event]:
        """The last events of a failed response."""
        events = self._closed("incomplete")
        code = _FAILURES.get(error.status, "server_error")
        self.response = {**self._response("failed"), "error": {"code": code, "message": error.message}}
        return self._numbered([*events, {"type": "response.failed", "response": self.response}])

    def _standing(self, status: str, *kinds: str) -> list[Event]:
        self.response = self._response(status)
        return self._numbered([{"type": f"response.{kind}", "response": self.response} for kind in kinds])

    def _written(self, pieces: list[ReplyPiece]) -> list[Event]:
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
        """Close the open item, if any, and return the index of the next one."""
        return len(self._output) + (self._item is not None)

    def _opened(self, item: Item, kind: type[ReplyPiece]) -> list[Event]:
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
