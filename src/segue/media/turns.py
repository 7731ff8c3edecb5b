"""Parse a message's other fields for the chat template: tool calls, tool call ids, reasoning, a name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from segue.messages.errors import InvalidRequest, wrong
from segue.messages.limits import check_carried

TURN_KEYS = frozenset({"name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"})


def extra_of(values: Mapping[str, Any], role: str, field: str) -> dict[str, Any]:
    """Return `Message.extra` in OpenAI's format, except that call arguments are parsed objects, which templates print.

    Raises `InvalidRequest` with the path of the wrong field.
    """
    extra: dict[str, Any] = {}
    for key in TURN_KEYS & values.keys():
        value, at = values[key], f"{field}.{key}"
        if value is None or value == []:
            continue
        if key == "name":
            extra["name"] = _text(value, at)
        elif role != ("tool" if key == "tool_call_id" else "assistant"):
            raise InvalidRequest(f"{at} does not go with role {role!r}; leave it out", field=at)
        elif key == "tool_calls":
            extra["tool_calls"] = _calls(value, at)
        else:
            extra["reasoning_content" if key == "reasoning" else key] = _text(value, at)
    check_carried(extra, field)
    return extra


def _calls(value: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise wrong(field, value, "a list of calls")
    return [_call(call, f"{field}[{index}]") for index, call in enumerate(value)]


def _call(call: object, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise wrong(field, call, 'an object with "function"')
    name = _text(function.get("name"), f"{field}.function.name")
    arguments = _arguments(function.get("arguments"), f"{field}.function.arguments")
    kept = {"id": _text(call["id"], f"{field}.id")} if call.get("id") is not None else {}
    return {**kept, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(value: object, field: str) -> dict[str, Any]:
    if isinstance(value, str):
        value = _read(value)
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        raise wrong(field, value, "the JSON of an object")
    return dict(value)


def _read(text: str) -> Any:
    """Parse the arguments of a call. The model wrote them, perhaps truncated, which must not end a conversation: text
    that is not a JSON object becomes an empty one, as in vLLM, since templates print objects."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise wrong(field, value, "a string")
    return value
