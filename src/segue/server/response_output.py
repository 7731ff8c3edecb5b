"""The items of a response as they grow: each says what it adds to the stream, and what it is in the end."""

from __future__ import annotations

import uuid
from typing import Any, Protocol

from segue.models.dialects.pieces import CallBegun

Event = dict[str, Any]


class Item(Protocol):
    """One entry of `output`. Its events lack the sequence number only."""

    def begin(self) -> list[Event]:
        """It is there, with nothing in it yet."""
        ...

    def add(self, text: str, logprobs: list[Any]) -> Event:
        """More of it."""
        ...

    def end(self, status: str) -> tuple[list[Event], dict[str, Any]]:
        """(its last events, the item)."""
        ...


class Text:
    """What the model says, or thinks: an item of one part."""

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
    """A call of a function."""

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
