"""The items of the Responses API as messages of a chat completion, and what stands where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from segue.messages.errors import InvalidRequest, nearest, shown, wrong
from segue.server.body import check_names
from segue.server.errors import Unsupported

_ROLES = ("user", "system", "developer", "assistant")
_KEYS = {
    "message": ("type", "role", "content", "id", "status", "phase"),
    "function_call": ("type", "name", "arguments", "call_id", "id", "status", "caller", "namespace", "async"),
    "function_call_output": ("type", "call_id", "output", "id", "status", "caller", "name", "namespace"),
    "reasoning": ("type", "id", "summary", "content", "encrypted_content", "status"),
}
"""What may stand in an item; what is not read (`id`, `status`, …) is what an output carries when it is sent back."""
_PARTS = {
    "input_text": ("type", "text", "prompt_cache_breakpoint"),
    "output_text": ("type", "text", "annotations", "logprobs"),
    "text": ("type", "text"),
    "refusal": ("type", "refusal"),
    "input_image": ("type", "image_url", "detail", "file_id", "prompt_cache_breakpoint"),
    "input_audio": ("type", "input_audio"),
}
_OF_CHAT = ("image_url", "audio_url", "video_url")
"""Parts of chat completions that are taken as they are: this API has no video."""


@dataclass
class Conversation:
    """Messages of a chat completion, made from items one after the other."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    _parts: dict[str, str] = field(default_factory=dict)
    _whole: dict[str, str] = field(default_factory=dict)
    _open: bool = False
    """The last message is the assistant's, and more of the same reply may come."""

    @property
    def written(self) -> dict[str, str]:
        """Where in the messages → where in the client's items; the most special places first."""
        return {**self._parts, **self._whole}

    def system(self, text: str, at: str) -> None:
        """Instructions."""
        self._bare("system", text, at)

    def user(self, text: str, at: str) -> None:
        """A bare text."""
        self._bare("user", text, at)

    def item(self, item: object, at: str) -> None:
        """Raises `InvalidRequest` naming what is wrong; what a chat completion checks by itself is left to it."""
        if not isinstance(item, dict):
            raise wrong(at, item, "an item: an object with a type")
        kind = item.get("type", "message" if "role" in item else None)
        if not isinstance(kind, str) or kind not in _KEYS:
            raise Unsupported(
                f"{at}.type is {shown(kind)}, no item this server takes{nearest(kind, _KEYS)}", field=f"{at}.type"
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
        """The assistant's message that goes on, unless it has one of `taken`, behind which such an item begins anew."""
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
        """Of the last message."""
        place = f"{self._place(len(self.messages) - 1)}.content"
        if not isinstance(content, list):
            self._parts[place] = at
            return content
        parts = []
        for index, part in enumerate(content):
            self._parts[f"{place}[{index}]"] = f"{at}[{index}]"
            parts.append(_part(part, f"{at}[{index}]"))
        self._whole = {place: at, **self._whole}
        return parts

    def _reasoning(self, item: Mapping[str, Any], at: str) -> None:
        """A thought goes before what was said after it; where only its summary or its cipher is there, it is gone."""
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
        self._whole = {place: at, **self._whole}
        message.setdefault("content", None)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls.append({"id": item.get("call_id"), "type": "function", "function": function})


def _part(part: object, at: str) -> object:
    """A part of a message as a chat completion has it."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind in _OF_CHAT:
        return part
    if not isinstance(kind, str) or kind not in _PARTS:
        hint = nearest(kind, (*_PARTS, *_OF_CHAT))
        raise Unsupported(f"{at}.type is {shown(kind)}, no part this server takes{hint}", field=f"{at}.type")
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
