"""Converts turns and blocks of Anthropic's Messages API to chat messages, and records where each part came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from segue.media.parts import STRING, Schema, any_kind, object_of
from segue.messages.errors import InvalidRequest, nearest, shown, wrong
from segue.server.http.body import check_names
from segue.server.http.errors import Unsupported

_ROLES = ("user", "assistant", "system")
_HINTS = ("type", "cache_control")
"""Keys allowed in any block. They are ignored: prefix caching is automatic."""
_KEYS = {
    "text": (*_HINTS, "text", "citations"),
    "image": (*_HINTS, "source"),
    "document": (*_HINTS, "source", "title", "context", "citations"),
    "tool_result": (*_HINTS, "tool_use_id", "content", "is_error"),
    "tool_use": (*_HINTS, "id", "name", "input", "caller"),
    "thinking": (*_HINTS, "thinking", "signature"),
    "redacted_thinking": (*_HINTS, "data"),
}
_OF_ROLE = {
    "user": ("text", "image", "document", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
    "tool_result": ("text", "image", "document"),
}
_SOURCES = {"base64": ("type", "media_type", "data"), "url": ("type", "url")}


def blocks_schema(role: str) -> Schema:
    """Schema of a turn's `content` as a list, by role; also of `tool_result`."""
    texts = dict.fromkeys(("text", "thinking", "signature", "data", "id", "name", "tool_use_id"), STRING)
    source = {"type": "object", "properties": {"type": STRING}, "required": ["type"]}
    types: dict[str, Schema] = {**texts, "source": source, "input": {"type": "object"}}
    if role != "tool_result":
        types["content"] = {"anyOf": [STRING, blocks_schema("tool_result"), {"type": "null"}]}
    return {"type": "array", "items": {"anyOf": any_kind({kind: _KEYS[kind] for kind in _OF_ROLE[role]}, types)}}


def turns_schema() -> Schema:
    """Schema of `messages`."""
    keys = ("role", "content")
    turns = [
        object_of(keys, {"role": {"const": role}, "content": {"anyOf": [STRING, blocks_schema(role)]}}, keys)
        for role in _ROLES
    ]
    return {"type": "array", "items": {"anyOf": turns}}


@dataclass
class Turns:
    """Builds the messages of a chat completion from turns, one after the other."""

    _messages: list[dict[str, Any]] = field(default_factory=list)
    _thoughts: dict[int, list[str]] = field(default_factory=dict)
    """Per message: its thinking blocks."""
    _parts: dict[str, str] = field(default_factory=dict)
    _whole: dict[str, str] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of all turns so far."""
        thoughts = {index: {"reasoning_content": "".join(texts)} for index, texts in self._thoughts.items()}
        return [{**message, **thoughts.get(index, {})} for index, message in enumerate(self._messages)]

    @property
    def written(self) -> dict[str, str]:
        """Path in the chat messages → path in the client's body; the most specific paths first."""
        return {**self._parts, **self._whole}

    def system(self, text: object, at: str) -> None:
        """Add the system prompt: a text, or text blocks. Raises `InvalidRequest`."""
        self._blocks("system", text, at)

    def turn(self, turn: object, at: str) -> None:
        """Add one entry of `messages`. Raises `InvalidRequest`; the chat completion checks the rest."""
        if not isinstance(turn, dict):
            raise wrong(at, turn, "an object with role and content")
        check_names(turn, ("role", "content"), at)
        role = turn.get("role")
        if role not in _ROLES:
            raise InvalidRequest(
                f"{at}.role is {shown(role)}, no known role{nearest(role, _ROLES)}", field=f"{at}.role"
            )
        self._blocks(role, turn.get("content"), f"{at}.content")

    def _blocks(self, role: str, content: object, at: str) -> None:
        """Merge consecutive turns of one role, except tool results, which are separate messages."""
        if content == [] and role != "assistant":  # what the model has said may be nothing
            raise InvalidRequest(f"{at} is empty; it must have at least one block", field=at)
        for block, place in _listed(content, at):
            kind = _kind(block, place, _OF_ROLE[role])
            if kind == "tool_result":
                self._result(block, place)
            elif kind == "tool_use":
                self._call(block, place)
            elif kind == "thinking":
                self._message(role, place)
                self._thoughts.setdefault(len(self._messages) - 1, []).append(_text(block, "thinking", place))
            elif kind != "redacted_thinking":
                self._add(self._message(role, place), _parts(block, kind, place), place)

    def _message(self, role: str, at: str) -> dict[str, Any]:
        """The last message if this role continues it, else a new one."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._whole[f"messages[{len(self._messages)}]"] = at
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]

    def _add(self, message: dict[str, Any], parts: list[dict[str, Any]], at: str) -> None:
        for part in parts:
            place = f"messages[{len(self._messages) - 1}].content[{len(message['content'])}]"
            self._parts |= {f"{place}.image_url.url": f"{at}.source", place: at}
            message["content"].append(part)

    def _call(self, block: Mapping[str, Any], at: str) -> None:
        message = self._message("assistant", at)
        given = block.get("input", {})
        if not isinstance(given, dict):
            raise wrong(f"{at}.input", given, "an object")
        calls: list[dict[str, Any]] = message.setdefault("tool_calls", [])
        self._parts[f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}]"] = at
        function = {"name": _text(block, "name", at), "arguments": msgspec.json.encode(given).decode()}
        calls.append({"id": _text(block, "id", at), "type": "function", "function": function})

    def _result(self, block: Mapping[str, Any], at: str) -> None:
        place = f"messages[{len(self._messages)}]"
        self._parts[f"{place}.tool_call_id"] = f"{at}.tool_use_id"
        self._whole[place] = at
        message: dict[str, Any] = {"role": "tool", "tool_call_id": _text(block, "tool_use_id", at), "content": []}
        self._messages.append(message)
        content = block.get("content")
        for inner, inner_at in [] if content is None else _listed(content, f"{at}.content"):
            kind = _kind(inner, inner_at, _OF_ROLE["tool_result"])
            self._add(message, _parts(inner, kind, inner_at), inner_at)


def _listed(content: object, at: str) -> list[tuple[dict[str, Any], str]]:
    """Each block with its path; a bare text counts as one block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, at)]
    if not isinstance(content, list):
        raise wrong(at, content, "a string or a list of blocks")
    blocks = []
    for index, block in enumerate(content):
        place = f"{at}[{index}]"
        if not isinstance(block, dict):
            raise wrong(place, block, "a block: an object with a type")
        blocks.append((block, place))
    return blocks


def _kind(block: dict[str, Any], at: str, known: tuple[str, ...]) -> str:
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in known:
        raise Unsupported(
            f"{at}.type is {shown(kind)}, which this server does not accept there{nearest(kind, known)}",
            field=f"{at}.type",
        )
    # clients send answers back, with null for every key that this server did not set
    check_names({name: value for name, value in block.items() if value is not None}, _KEYS[kind], at)
    return kind


def _text(block: Mapping[str, Any], name: str, at: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise wrong(f"{at}.{name}", text, "a string")
    return text


def _parts(block: Mapping[str, Any], kind: str, at: str) -> list[dict[str, Any]]:
    """Convert a block to parts of a chat message."""
    if kind == "text":
        return [{"type": "text", "text": _text(block, "text", at)}]
    source = block.get("source")
    if not isinstance(source, dict):
        raise wrong(f"{at}.source", source, "an object")
    at = f"{at}.source"
    if kind == "document":
        if source.get("type") != "text":
            raise Unsupported(
                f"{at}.type is {shown(source.get('type'))}; documents must have source type text",
                field=f"{at}.type",
            )
        return [{"type": "text", "text": _text(source, "data", at)}]
    form = source.get("type")
    if form not in _SOURCES:
        raise Unsupported(
            f"{at}.type is {shown(form)}; this server keeps no files: it must be base64 or url", field=f"{at}.type"
        )
    check_names(source, _SOURCES[form], at)
    if form == "url":
        return [{"type": "image_url", "image_url": {"url": _text(source, "url", at)}}]
    url = f"data:{_text(source, 'media_type', at)};base64,{_text(source, 'data', at)}"
    return [{"type": "image_url", "image_url": {"url": url}}]
