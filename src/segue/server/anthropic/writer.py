"""Converts the deltas of a generation to events of Anthropic's Messages API, and to the whole message."""

from __future__ import annotations

from typing import Any

import msgspec

from segue.messages.deltas import Delta, Finished, TextDelta
from segue.models.shared.dialects.pieces import CallBegun, ReplyPiece, Said, Thought
from segue.server.anthropic.request import MessagesRequest
from segue.server.openai.chat.reply import ReplyReader, call_id

Event = dict[str, Any]
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""Finish reason of a chat completion → `stop_reason`; all others mean `end_turn`."""


class _Block:
    """One growing entry of `content`."""

    def __init__(self, begun: dict[str, Any], grows: str, delta: str) -> None:
        """`grows`: the field that grows; `delta`: the event's name for its increment."""
        self._begun = begun
        self._grows = grows
        self._delta = delta
        self._texts: list[str] = []

    def begin(self) -> dict[str, Any]:
        return self._begun

    def add(self, text: str) -> dict[str, Any]:
        self._texts.append(text)
        field = "partial_json" if self._grows == "input" else self._grows
        return {"type": self._delta, field: text}

    def whole(self) -> dict[str, Any]:
        """The finished block. Tool input that is not a complete JSON object becomes an empty one."""
        text = "".join(self._texts)
        return {**self._begun, self._grows: _object(text) if self._grows == "input" else text}


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


class MessageWriter:
    """Writes one message."""

    def __init__(self, asked: MessagesRequest) -> None:
        self._asked = asked
        self._reader = ReplyReader(asked.chat)
        self._content: list[dict[str, Any]] = []
        self._block: _Block | None = None
        self._kind: type[ReplyPiece] | None = None
        """Text of the open block so far."""
        self._end: Finished | None = None

    def begin(self, first: Delta) -> list[Event]:
        """The first event; the first delta gives the length of the prompt."""
        prompt = len(first.prompt_token_ids) if isinstance(first, TextDelta) else 0
        usage = {"input_tokens": prompt, "output_tokens": 0}
        return [{"type": "message_start", "message": {**self.message, "usage": usage}}]

    def take(self, delta: Delta) -> list[Event]:
        """The events of a delta; the last delta ends the message."""
        if isinstance(delta, TextDelta):
            return self._written(self._reader.feed(delta.text, len(delta.token_ids)))
        if not isinstance(delta, Finished):
            return []
        events = self._written(self._reader.finish()) + self._closed()
        self._end = delta
        message = self.message
        ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return [*events, {"type": "message_delta", "delta": ended, "usage": message["usage"]}, {"type": "message_stop"}]

    @property
    def message(self) -> dict[str, Any]:
        """The message in its current state."""
        return {
            "id": self._asked.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._asked.chat.model,
            "content": list(self._content),
            **self._stopped(),
            "usage": self._usage(),
        }

    def _written(self, pieces: list[ReplyPiece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, CallBegun):
                begun = {"type": "tool_use", "id": call_id(self._asked.chat), "name": piece.name, "input": {}}
                events += self._opened(_Block(begun, "input", "input_json_delta"), CallBegun)
                continue
            if isinstance(piece, Thought) and self._kind is not Thought:
                begun = {"type": "thinking", "thinking": "", "signature": ""}
                events += self._opened(_Block(begun, "thinking", "thinking_delta"), Thought)
            elif isinstance(piece, Said) and self._kind is not Said:
                events += self._opened(_Block({"type": "text", "text": ""}, "text", "text_delta"), Said)
            assert self._block is not None, "arguments come after the call has begun"
            delta = self._block.add(piece.text)
            events.append({"type": "content_block_delta", "index": len(self._content), "delta": delta})
        return events

    def _opened(self, block: _Block, kind: type[ReplyPiece]) -> list[Event]:
        events = self._closed()
        self._block, self._kind = block, kind
        return [
            *events,
            {"type": "content_block_start", "index": len(self._content), "content_block": block.begin()},
        ]

    def _closed(self) -> list[Event]:
        if self._block is None:
            return []
        self._content.append(self._block.whole())
        self._block = self._kind = None
        return [{"type": "content_block_stop", "index": len(self._content) - 1}]

    def _stopped(self) -> dict[str, Any]:
        if self._end is None:
            return {"stop_reason": None, "stop_sequence": None}
        by = next((choice.stop_reason for choice in self._end.choices), None)
        reason = self._reader.finish_reason(self._end)
        if isinstance(by, str) and reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": by}
        return {"stop_reason": _STOPS.get(reason, "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Token counts; tokens found in the prefix cache are counted separately, as in Anthropic's API."""
        if self._end is None:
            return {"input_tokens": 0, "output_tokens": 0}
        usage = self._end.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": sum(usage.completion_modalities.values()),
        }
