"""One choice's text as it comes → what a message carries: content, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue.messages.deltas import Finished
from segue.models.dialects.pieces import CallArguments, CallBegun, Piece, Said, Thought
from segue.server.chat_request import ChatRequest


class ReplyReader:
    """Reads one choice."""

    def __init__(self, chat: ChatRequest) -> None:
        self._parser = chat.tools.parser(chat.dialect, opened=chat.in_thought)()
        self._parallel = chat.tools.parallel
        self._thoughts = chat.include_reasoning
        self.called = False
        """The reply calls a tool."""
        self.thought_tokens = 0
        self._unread = 0
        """Tokens whose text is held back."""

    def feed(self, text: str, tokens: int) -> list[Piece]:
        """The text of so many tokens."""
        self._unread += tokens
        return self._counted(self._parser.feed(text))

    def finish(self) -> list[Piece]:
        """What was held back."""
        return self._counted(self._parser.finish())

    def finish_reason(self, finished: Finished) -> str:
        """`tool_calls` where the model ended its reply after calling."""
        return "tool_calls" if self.called and finished.finish_reason == "stop" else finished.finish_reason

    def _counted(self, pieces: Sequence[Piece]) -> list[Piece]:
        if pieces:
            self.thought_tokens += self._unread if isinstance(pieces[-1], Thought) else 0
            self._unread = 0
        return self._wanted(pieces)

    def _wanted(self, pieces: Sequence[Piece]) -> list[Piece]:
        wanted: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Thought) and not self._thoughts:
                continue
            if isinstance(piece, CallBegun | CallArguments):
                self.called = True
                if piece.index and not self._parallel:
                    continue
            wanted.append(piece)
        return wanted


def delta_of(piece: Piece, chat: ChatRequest) -> dict[str, Any]:
    """The `delta` of a streamed choice that one piece becomes."""
    match piece:
        case Said(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegun(index, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id(chat), "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_fields(pieces: Sequence[Piece], chat: ChatRequest) -> dict[str, Any]:
    """The fields of a whole message; content is None where there are calls and no text."""
    said = "".join(piece.text for piece in pieces if isinstance(piece, Said))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, CallBegun):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": call_id(chat), "type": "function", "function": function})
        elif isinstance(piece, CallArguments):
            calls[piece.index]["function"]["arguments"] += piece.text
    fields: dict[str, Any] = {"content": said if said or not calls else None}
    if thought:
        fields |= {"reasoning_content": thought, "reasoning": thought}
    if calls:
        fields["tool_calls"] = calls
    return fields


def call_id(chat: ChatRequest) -> str:
    """A fresh id, in the form the model's own template takes back."""
    return chat.dialect.new_call_id()
