"""Converts items of the Responses API to chat messages, and its `tools` and `tool_choice` to those of a chat
completion.

Both conversions record the path of each part in the client's body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from segue.media.parts import STRING, Schema, any_kind, text_or
from segue.messages.errors import InvalidRequest, nearest, shown, wrong
from segue.server.http.body import check_names
from segue.server.http.errors import Unsupported

_PASSED = ("name", "description", "parameters", "strict")
_TOOL_KEYS = ("type", *_PASSED, "output_schema", "allowed_callers", "defer_loading")


def chat_tools(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """(parameters of a chat completion, path in them → path in the client's body).

    Raises `InvalidRequest`; `Unsupported` for tools that OpenAI runs itself.
    """
    given = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or [])]
    places = list(range(len(given)))
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            places = _allowed(choice, [tool["function"].get("name") for tool in given])
            given = [given[index] for index in places]
            choice = str(choice.get("mode", "auto"))
        elif kind == "function":
            check_names(choice, ("type", "name"), "tool_choice")
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        else:
            raise Unsupported(
                f"tool_choice.type is {shown(kind)}; this server supports function and allowed_tools",
                field="tool_choice.type",
            )
    written: dict[str, str] = {}
    for shown_at, index in enumerate(places):
        written |= {f"tools[{shown_at}].function": f"tools[{index}]", f"tools[{shown_at}]": f"tools[{index}]"}
    return {"tools": given or None, "tool_choice": choice}, written


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise Unsupported(
            f"{at}.type is {shown(kind)}; this server runs no tools of its own: it takes only functions",
            field=f"{at}.type",
        )
    check_names(tool, _TOOL_KEYS, at)
    return {"type": "function", "function": {name: tool[name] for name in _PASSED if tool.get(name) is not None}}


def _allowed(choice: dict[str, Any], known: list[Any]) -> list[int]:
    """Indices of the tools that `allowed_tools` names."""
    check_names(choice, ("type", "mode", "tools"), "tool_choice")
    if choice.get("mode") not in ("auto", "required"):
        raise wrong("tool_choice.mode", choice.get("mode"), "auto or required")
    tools = choice.get("tools")
    if not isinstance(tools, list) or not tools:
        raise wrong("tool_choice.tools", tools, "a list of tools, at least one")
    places = []
    for index, tool in enumerate(tools):
        name, at = tool.get("name") if isinstance(tool, dict) else None, f"tool_choice.tools[{index}]"
        if name not in known:
            hint = nearest(name, known) if isinstance(name, str) else ""
            raise InvalidRequest(f"{at} is {shown(tool)}, which is not one of tools{hint}", field=at)
        places.append(known.index(name))
    return sorted(set(places))


_ROLES = ("user", "system", "developer", "assistant")
_KEYS = {
    "message": ("type", "role", "content", "id", "status", "phase"),
    "function_call": ("type", "name", "arguments", "call_id", "id", "status", "caller", "namespace", "async"),
    "function_call_output": ("type", "call_id", "output", "id", "status", "caller", "name", "namespace"),
    "reasoning": ("type", "id", "summary", "content", "encrypted_content", "status"),
}
"""Keys allowed per type of item; `id`, `status` and others, which items of an output carry, are ignored."""
_PARTS = {
    "input_text": ("type", "text", "prompt_cache_breakpoint"),
    "output_text": ("type", "text", "annotations", "logprobs"),
    "text": ("type", "text"),
    "refusal": ("type", "refusal"),
    "input_image": ("type", "image_url", "detail", "file_id", "prompt_cache_breakpoint"),
    "input_audio": ("type", "input_audio"),
}
_OF_CHAT = ("image_url", "audio_url", "video_url")
"""Parts of chat completions that are also accepted: the Responses API has no video."""


def items_schema() -> Schema:
    """Schema of `input` as a list."""
    texts = dict.fromkeys(("text", "refusal"), STRING)
    url = {"type": "object", "properties": {"url": STRING}, "required": ["url"]}
    parts = any_kind({**_PARTS, **{kind: (kind,) for kind in _OF_CHAT}}, {**texts, **dict.fromkeys(_OF_CHAT, url)})
    of_image = next(part for part in parts if part["properties"]["type"] == {"const": "input_image"})
    of_image["properties"]["image_url"] = {"type": ["string", "null"]}
    types = {
        "role": {"enum": list(_ROLES)},
        "content": text_or(parts),
        "output": text_or(parts),
        **dict.fromkeys(("name", "arguments", "call_id"), STRING),
    }
    of_kind = any_kind(_KEYS, types)
    for one in of_kind:
        kind = one["properties"]["type"]["const"]
        if kind == "message":  # also recognised by its role
            one["required"] = ["role"]
        elif kind == "reasoning":
            one["properties"]["content"] = {"type": ["array", "null"]}
    return {"items": {"anyOf": of_kind}}


@dataclass
class Conversation:
    """Builds the messages of a chat completion from items, one after the other."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    _parts: dict[str, str] = field(default_factory=dict)
    _whole: dict[str, str] = field(default_factory=dict)
    _lists: list[tuple[str, str]] = field(default_factory=list)
    """Lists within messages; the last entry is the most specific path."""
    _open: bool = False
    """Whether the last message is the assistant's and the same reply may continue."""

    @property
    def written(self) -> dict[str, str]:
        """Path in the chat messages → path in the client's items; the most specific paths first."""
        return {**self._parts, **dict(reversed(self._lists)), **self._whole}

    def system(self, text: str, at: str) -> None:
        """Add instructions."""
        self._bare("system", text, at)

    def user(self, text: str, at: str) -> None:
        """Add a bare text of the user."""
        self._bare("user", text, at)

    def item(self, item: object, at: str) -> None:
        """Add an item. Raises `InvalidRequest`; the chat completion checks the rest."""
        if not isinstance(item, dict):
            raise wrong(at, item, "an item: an object with a type")
        kind = item.get("type", "message" if "role" in item else None)
        if not isinstance(kind, str) or kind not in _KEYS:
            raise Unsupported(
                f"{at}.type is {shown(kind)}, which is not an item that this server accepts{nearest(kind, _KEYS)}",
                field=f"{at}.type",
            )
        check_names(item, _KEYS[kind], at)
        if kind == "message":
            self._message(item, at)
        elif kind == "reasoning":
            self._reasoning(item, at)
        elif kind == "function_call":
            self._call(item, at)
        else:
            message = {"role": "tool", "tool_call_id": item.get("call_id")}
            self._add(message, at)
            message["content"] = self._content(item.get("output"), f"{at}.output")

    def _bare(self, role: str, text: str, at: str) -> None:
        self._parts[f"{self._place(len(self.messages))}.content"] = at
        self._add({"role": role, "content": text}, at)

    def _add(self, message: dict[str, Any], at: str, *, opened: bool = False) -> dict[str, Any]:
        self._whole[self._place(len(self.messages))] = at
        self.messages.append(message)
        self._open = opened
        return message

    def _place(self, index: int) -> str:
        return f"messages[{index}]"

    def _reply(self, at: str, *, taken: Sequence[str]) -> dict[str, Any]:
        """The assistant's message to continue, or a new one if it already has one of `taken`."""
        if self._open and not any(name in self.messages[-1] for name in taken):
            return self.messages[-1]
        return self._add({"role": "assistant"}, at, opened=True)

    def _message(self, item: Mapping[str, Any], at: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidRequest(
                f"{at}.role is {shown(role)}, no known role{nearest(role, _ROLES)}", field=f"{at}.role"
            )
        if role == "assistant":
            message = self._reply(at, taken=("content", "tool_calls"))
        else:
            message = self._add({"role": role}, at)
        message["content"] = self._content(item.get("content"), f"{at}.content")

    def _content(self, content: object, at: str) -> object:
        """Content of the last message."""
        place = f"{self._place(len(self.messages) - 1)}.content"
        if not isinstance(content, list):
            self._parts[place] = at
            return content
        parts = []
        for index, part in enumerate(content):
            self._parts[f"{place}[{index}]"] = f"{at}[{index}]"
            parts.append(_part(part, f"{at}[{index}]"))
        self._lists.append((place, at))
        return parts

    def _reasoning(self, item: Mapping[str, Any], at: str) -> None:
        """Add a thought, which precedes the reply after it. One with only a summary or encrypted content is dropped."""
        content = item.get("content") or []
        if not isinstance(content, list):
            raise wrong(f"{at}.content", content, "a list of parts")
        texts = []
        for index, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                where = f"{at}.content[{index}]"
                raise wrong(where, part, '{"type": "reasoning_text", "text": …}')
            texts.append(part["text"])
        if texts:
            message = self._reply(at, taken=("reasoning_content", "content", "tool_calls"))
            message["reasoning_content"] = "".join(texts)

    def _call(self, item: Mapping[str, Any], at: str) -> None:
        message = self._reply(at, taken=())
        calls: list[dict[str, Any]] = message.setdefault("tool_calls", [])
        place = f"{self._place(len(self.messages) - 1)}.tool_calls"
        self._parts[f"{place}[{len(calls)}].function"] = at
        self._parts[f"{place}[{len(calls)}].id"] = f"{at}.call_id"
        self._lists.append((place, at))
        message.setdefault("content", None)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls.append({"id": item.get("call_id"), "type": "function", "function": function})


def _part(part: object, at: str) -> object:
    """Convert a part of a message to a chat completion's."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind in _OF_CHAT:
        return part
    if not isinstance(kind, str) or kind not in _PARTS:
        hint = nearest(kind, (*_PARTS, *_OF_CHAT))
        raise Unsupported(
            f"{at}.type is {shown(kind)}, which is not a part that this server accepts{hint}", field=f"{at}.type"
        )
    check_names(part, _PARTS[kind], at)
    if kind == "input_audio":
        return part
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise Unsupported(
                f"{at}.file_id is {shown(part['file_id'])}; this server keeps no files: give image_url",
                field=f"{at}.file_id",
            )
        detail = {} if part.get("detail") is None else {"detail": part["detail"]}
        return {"type": "image_url", "image_url": {"url": part.get("image_url"), **detail}}
    return {"type": "text", "text": part.get("refusal" if kind == "refusal" else "text")}
