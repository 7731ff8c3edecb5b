"""OpenAI-style messages, from JSON or from Python, into `Message`s. Nothing is decoded here: bytes are only moved."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from segue.media.arrays import audio_part, image_part, video_part
from segue.media.embeds import EMBEDS, embeds_file
from segue.media.sources import PYTHON_POLICY, MediaPolicy, check_size, from_base64, read_path, read_source
from segue.media.turns import TURN_KEYS, extra_of
from segue.messages.errors import InvalidRequest, nearest, shown
from segue.messages.request import MediaKind, MediaPart, Message, Part, TextPart

__all__ = ["PYTHON_POLICY", "MediaPolicy", "messages_from", "part_of"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
          "tool": "tool"}  # fmt: skip
"""OpenAI's role → the role chat templates know."""
_MESSAGE_KEYS = frozenset({"role", "content"}) | TURN_KEYS
_REPLY_KEYS = frozenset({"refusal", "annotations", "function_call", "audio", "images"})
"""Keys of an assistant message as a reply carries them: accepted back as long as they are empty."""
_NOTED_KEYS = frozenset({"cache_control", "reasoning_details", "thinking_blocks", "provider_specific_fields"})
"""Keys of a message that are for others than the model: clients of several services send them to all, and back."""
_NOTED_PART_KEYS = frozenset({"cache_control"})
_URL_PARTS: dict[str, MediaKind] = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
_PLAIN_PARTS: dict[str, MediaKind] = {"image": "image", "audio": "audio", "video": "video"}
_PART_TYPES = ("text", "refusal", EMBEDS, "input_audio", *_URL_PARTS, *_PLAIN_PARTS)
_INPUT_AUDIO_FORMATS = frozenset({"wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm"})
_ARRAYS: dict[MediaKind, Callable[[Any, str], MediaPart]] = {
    "image": image_part,
    "audio": audio_part,
    "video": video_part,
}


def messages_from(messages: object, policy: MediaPolicy, field: str = "messages") -> list[Message]:
    """Checked messages. Blocking (files, HTTP). Raises `InvalidRequest` with the path of what is wrong.

    A message is `{"role", "content"}`; content is a string or a list of parts: `text`, `image_url`, `audio_url`,
    `video_url` (`{"url": data URL | path | http(s)}`), `input_audio` (`{"data": base64, "format"}`), `refusal`,
    `prompt_embeds` (`data`: base64, the bytes of a file or an array, see `segue.media.embeds`), and
    `{"type": "image" | "audio" | "video", <type>: source}` where a source is a URL, a path, the bytes of a file or an
    array (see `segue.media.arrays`). Besides, the fields of `segue.media.turns`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest(f"{field} is {shown(messages)}; it must be a list of messages", field=field)
    if not messages:
        raise InvalidRequest(f"{field} is empty; at least one message is needed", field=field)
    return [_message(message, policy, f"{field}[{index}]") for index, message in enumerate(messages)]


def _message(message: object, policy: MediaPolicy, field: str) -> Message:
    values = _object(message, field, 'an object with "role" and "content"')
    _check_message_keys(values, field)
    role = values.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        hint = nearest(role, _ROLES) if isinstance(role, str) else f"; known: {', '.join(_ROLES)}"
        raise InvalidRequest(f"{field}.role is {shown(role)}, no known role{hint}", field=f"{field}.role")
    extra = extra_of(values, _ROLES[role], field)
    content = values.get("content")
    spoken = values.get("audio")
    if role == "assistant" and isinstance(spoken, Mapping):
        # our own reply sent back: its text is what the model said; samples of an earlier reply are not read again
        content = spoken.get("transcript") if content is None else content
    if isinstance(content, str):
        return Message(_ROLES[role], [TextPart(_text(content, f"{field}.content"))], extra)
    if content is None and "tool_calls" in extra:
        return Message(_ROLES[role], [], extra)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(
            f"{field}.content is {shown(content)}; it must be a string or a list of parts", field=f"{field}.content"
        )
    return Message(
        _ROLES[role], [_part(part, policy, f"{field}.content[{index}]") for index, part in enumerate(content)], extra
    )


def _check_message_keys(values: Mapping[str, Any], field: str) -> None:
    for key, value in values.items():
        if key in _MESSAGE_KEYS or key in _NOTED_KEYS:
            continue
        if key not in _REPLY_KEYS:
            known = _MESSAGE_KEYS | _REPLY_KEYS
            raise InvalidRequest(f"{field} has no field {shown(key)}{nearest(str(key), known)}", field=f"{field}.{key}")
        if value and not (values.get("role") == "assistant" and key in ("audio", "images", "annotations")):
            raise InvalidRequest(f"{field}.{key} is not supported here; leave it out", field=f"{field}.{key}")


def _part(part: object, policy: MediaPolicy, field: str) -> Part:
    if isinstance(part, str):
        return TextPart(_text(part, field))
    values = _object(part, field, 'a string or an object with "type"')
    values = {key: value for key, value in values.items() if key not in _NOTED_PART_KEYS}
    kind = values.get("type")
    if not isinstance(kind, str) or kind not in _PART_TYPES:
        hint = nearest(kind, _PART_TYPES) if isinstance(kind, str) else f"; known: {', '.join(_PART_TYPES)}"
        raise InvalidRequest(f"{field}.type is {shown(kind)}, no known part{hint}", field=f"{field}.type")
    if kind == "text":
        _only(values, {"type", "text"}, field)
        return TextPart(_text(values.get("text"), f"{field}.text"))
    if kind == "refusal":  # what the assistant said instead
        _only(values, {"type", "refusal"}, field)
        return TextPart(_text(values.get("refusal"), f"{field}.refusal"))
    if kind == EMBEDS:
        _only(values, {"type", "data"}, field)
        return _embedded(values.get("data"), policy, f"{field}.data", field)
    if kind == "input_audio":
        _only(values, {"type", "input_audio"}, field)
        return _input_audio(values.get("input_audio"), policy, f"{field}.input_audio", field)
    if kind in _URL_PARTS:
        _only(values, {"type", kind}, field)
        return _url_part(_URL_PARTS[kind], values.get(kind), policy, f"{field}.{kind}", field)
    return _plain_part(_PLAIN_PARTS[kind], values, policy, field)


def _embedded(value: object, policy: MediaPolicy, field: str, part_field: str) -> TextPart:
    if value is None:
        raise InvalidRequest(
            f"{field} is missing; it must be base64 of a file of torch.save or safetensors", field=field
        )
    data = from_base64(value, policy, field) if isinstance(value, str) else embeds_file(value, field)
    return TextPart("", data, part_field)


def _input_audio(value: object, policy: MediaPolicy, field: str, part_field: str) -> MediaPart:
    values = _object(value, field, 'an object with "data" (base64) and "format"')
    _only(values, {"data", "format"}, field)
    name, data = values.get("format"), values.get("data")
    if name is not None and (not isinstance(name, str) or name not in _INPUT_AUDIO_FORMATS):
        hint = nearest(str(name), _INPUT_AUDIO_FORMATS)
        raise InvalidRequest(f"{field}.format is {shown(name)}, no known format{hint}", field=f"{field}.format")
    if not isinstance(data, str):
        raise InvalidRequest(
            f"{field}.data is {shown(data)}; it must be the base64 of an audio file", field=f"{field}.data"
        )
    return MediaPart("audio", from_base64(data, policy, f"{field}.data"), field=part_field)


def _url_part(kind: MediaKind, value: object, policy: MediaPolicy, field: str, part_field: str) -> MediaPart:
    values = _object(value, field, 'an object with "url"')
    _only(values, {"url", "detail"} if kind == "image" else {"url"}, field)
    detail = values.get("detail")
    if detail not in (None, "auto", "high"):
        right = "leave it out: pictures are always seen in full detail"
        raise InvalidRequest(f"{field}.detail is {shown(detail)}; {right}", field=f"{field}.detail")
    url = values.get("url")
    if not isinstance(url, str) or not url:
        right = "it must be a data: URL, an http(s) URL or a file path"
        raise InvalidRequest(f"{field}.url is {shown(url)}; {right}", field=f"{field}.url")
    return MediaPart(kind, read_source(url, policy, f"{field}.url"), field=part_field)


def _plain_part(kind: MediaKind, values: Mapping[str, Any], policy: MediaPolicy, field: str) -> MediaPart:
    """`{"type": "image", "image": …}` as transformers has it; `url` and `path` are its other names for a source."""
    names = (kind, "url", "path")
    _only(values, {"type", *names}, field)
    given = [name for name in names if values.get(name) is not None]
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "has no source"
        raise InvalidRequest(f"{field} {what}; give one of: {', '.join(names)}", field=f"{field}.{kind}")
    return part_of(kind, values[given[0]], policy, f"{field}.{given[0]}", field)


def part_of(kind: MediaKind, source: Any, policy: MediaPolicy, at: str, field: str | None = None) -> MediaPart:
    """One medium from a URL, a path, the bytes of a file or an array; errors name `at`, the part is named `field`."""
    field = at if field is None else field
    if isinstance(source, str):
        return MediaPart(kind, read_source(source, policy, at), field=field)
    if isinstance(source, os.PathLike):
        return MediaPart(kind, read_path(cast("os.PathLike[str]", source), policy, at), field=field)
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        if not data:
            raise InvalidRequest(f"{at} is empty; it must be the bytes of a media file", field=at)
        check_size(len(data), policy, at)
        return MediaPart(kind, data, field=field)
    made = _ARRAYS[kind](source, at)
    check_size(len(made.data), policy, at)
    return MediaPart(kind, made.data, made.array, field)


def _object(value: object, field: str, right: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{field} is {shown(value)}; it must be {right}", field=field)
    return value


def _only(values: Mapping[str, Any], known: set[str], field: str) -> None:
    for key in values:
        if key not in known:
            raise InvalidRequest(f"{field} has no field {shown(key)}{nearest(str(key), known)}", field=f"{field}.{key}")


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} is {shown(value)}; it must be a string", field=field)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} holds half of a surrogate pair: not valid text", field=field) from error
    return value
