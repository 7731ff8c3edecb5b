"""What may be asked of a response that is kept: its events from some place on, the items that it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, wrong
from segue.server.paging import Page, listed
from segue.server.response_store import Turn, items_so_far

_DIGITS = 15
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def events_after(query: Mapping[str, str]) -> int | None:
    """The sequence number after which a client wants the events, from the query of a URL; None where it wants the
    response itself. Raises `InvalidRequest`."""
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream not in ("true", "false"):
        raise wrong("stream", stream, "true or false")
    if after is not None and not (after.isascii() and after.isdecimal() and len(after) <= _DIGITS):
        raise wrong("starting_after", after, "the sequence number of an event")
    if stream == "false":
        if after is not None:
            raise InvalidRequest("starting_after is given, but stream is not true", field="starting_after")
        return None
    return -1 if after is None else int(after)


def listed_items(response_id: str, before: Turn | None, inputs: bytes, page: Page) -> dict[str, Any]:
    """A page of the items that a response answers: the conversation `before` it, and what came with it."""
    items = [*items_so_far(before), *msgspec.json.decode(inputs)]
    own = response_id.removeprefix("resp_")
    return listed([_whole(item, f"{own}_{index}") for index, item in enumerate(items)], page, "item")


def _whole(item: dict[str, Any], place: str) -> dict[str, Any]:
    """An item with what a client may have left out: its type, an id, and parts in place of a bare text."""
    kind = item.get("type", "message")
    whole = {"id": f"{_PREFIXES[kind]}_{place}", "type": kind, "status": "completed"} | {
        name: value for name, value in item.items() if value is not None
    }
    content = whole.get("content")
    if kind == "message" and isinstance(content, str):
        said = item["role"] == "assistant"
        part = {"type": "output_text", "annotations": []} if said else {"type": "input_text"}
        whole["content"] = [{**part, "text": content}]
    return whole
