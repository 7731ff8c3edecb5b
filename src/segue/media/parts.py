"""Parse OpenAI-style messages, from JSON or Python, into `Message`s, and a prompt's images, under pipelines' argument
names, into media parts. Bytes are only moved, not decoded. The JSON schemas of the messages come from the same tables
of keys as the parsing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from segue.media.arrays import EMBEDS, audio_part, embeds_file, image_part, is_one, named_tensor, video_part
from segue.media.sources import PYTHON_POLICY, MediaPolicy, check_items, check_size, from_base64, read_path, read_source
from segue.media.turns import TURN_KEYS, extra_of
from segue.messages.errors import InvalidRequest, nearest, shown
from segue.messages.request import MEDIA, MULTI_MODAL_DATA, ArrayInfo, MediaPart, Message, Part, TextPart
from segue.messages.tensors import DTYPES

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}


def object_of(keys: Iterable[str], types: Mapping[str, Schema], required: Iterable[str] = ()) -> Schema:
    """Return the schema of an object with only these keys; `types`: schemas of their values, where known."""
    return {
        "type": "object",
        "properties": {key: types.get(key, {}) for key in sorted(keys)},
        "required": sorted(required),
        "additionalProperties": False,
    }


def any_kind(kinds: Mapping[str, Iterable[str]], types: Mapping[str, Schema]) -> list[Schema]:
    """Return a schema for each `type` of object. `kinds`: type → keys; `types`: as in `object_of`."""
    return [object_of({"type", *keys}, {**types, "type": {"const": kind}}, ["type"]) for kind, keys in kinds.items()]


def text_or(parts: list[Schema]) -> Schema:
    """Return the schema of a text or of a list of any of these parts."""
    return {"anyOf": [STRING, {"type": "array", "items": {"anyOf": parts}}]}


__all__ = ["PYTHON_POLICY", "MediaPolicy", "messages_from", "messages_schema", "part_of"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
          "tool": "tool"}  # fmt: skip
"""OpenAI's role → the chat templates' role."""
_MESSAGE_KEYS = frozenset({"role", "content"}) | TURN_KEYS
_REPLY_KEYS = frozenset({"refusal", "annotations", "function_call", "audio", "images"})
"""Keys of a reply's assistant message: accepted in a request as long as they are empty."""
_NOTED_KEYS = frozenset({"cache_control", "reasoning_details", "thinking_blocks", "provider_specific_fields"})
"""Ignored keys of a message, which do not concern the model: clients of several services send them to all."""
_NOTED_PART_KEYS = frozenset({"cache_control", "uuid"})
"""Ignored keys of a part; vLLM identifies a medium by its `uuid`, this server by its content."""
_URL_PARTS: dict[str, str] = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
_PLAIN_PARTS: dict[str, str] = {"image": "image", "audio": "audio", "video": "video"}
TENSOR = "tensor"
_MEDIA_TYPES = ("input_audio", TENSOR, *_URL_PARTS, *_PLAIN_PARTS)
_PART_KEYS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "refusal": ("refusal",),
    EMBEDS: ("data",),
    TENSOR: ("name", "dtype", "shape", "data"),
    "input_audio": ("input_audio",),
    **{kind: (kind,) for kind in _URL_PARTS},
    **{kind: (kind, "url", "path") for kind in _PLAIN_PARTS},
}
"""Type of part → its other keys."""
_AUDIO_KEYS = ("data", "format")
_TENSOR_TYPES: dict[str, Schema] = {
    "name": STRING,
    "dtype": STRING,
    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "data": {"anyOf": [STRING, {"type": "array"}]},
}
_OF_URL: dict[str, tuple[str, ...]] = {"image": ("detail",), "video": ("num_frames",)}
_INPUT_AUDIO_FORMATS = frozenset({"wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm"})
_ARRAYS: dict[str, Callable[[Any, str], MediaPart]] = {
    "image": image_part,
    "audio": audio_part,
    "video": video_part,
}


def messages_from(messages: object, policy: MediaPolicy, field: str = "messages") -> list[Message]:
    """Parse and check messages. Blocking (files, HTTP). Raises `InvalidRequest` with the path of the wrong field.

    A message is `{"role", "content"}`; content is a string or a list of parts: `text`, `image_url`, `audio_url`,
    `video_url` (`{"url": data URL | path | http(s)}`), `input_audio` (`{"data": base64, "format"}`), `refusal`,
    `prompt_embeds` (`data`: base64, the bytes of a file or an array, see `segue.media.arrays`), `tensor` (`name`, and
    `data`: nested lists, an array, or base64 of `dtype` and `shape`), and
    `{"type": "image" | "audio" | "video", <type>: source}` where a source is a URL, a path, the bytes of a file or an
    array (see `segue.media.arrays`). It may also have the fields of `segue.media.turns`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest(f"{field} is {shown(messages)}; it must be a list of messages", field=field)
    if not messages:
        raise InvalidRequest(f"{field} is empty; at least one message is needed", field=field)
    check_items(sum(_media_in(message) for message in messages), policy, field)
    policy = policy.begun()
    return [_message(message, policy, f"{field}[{index}]") for index, message in enumerate(messages)]


def _media_in(message: object) -> int:
    """Count the media parts of a message, before anything in it is checked or read."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return 0
    kinds = (part.get("type") for part in content if isinstance(part, Mapping))
    return sum(isinstance(kind, str) and kind in _MEDIA_TYPES for kind in kinds)


def messages_schema() -> Schema:
    """Return the JSON schema of the messages that `messages_from` accepts."""
    texts = dict.fromkeys(("text", "refusal", "data", *_PLAIN_PARTS, "url", "path"), STRING)
    audio = object_of(_AUDIO_KEYS, {"data": STRING, "format": {"enum": sorted(_INPUT_AUDIO_FORMATS)}}, ["data"])
    frames = {"type": ["integer", "null"], "minimum": 1}
    urls = {
        name: object_of(("url", *_OF_URL.get(kind, ())), {"url": STRING, "num_frames": frames}, ["url"])
        for name, kind in _URL_PARTS.items()
    }
    kinds = {kind: (*keys, *_NOTED_PART_KEYS) for kind, keys in _PART_KEYS.items() if kind != TENSOR}
    tensor = any_kind({TENSOR: (*_PART_KEYS[TENSOR], *_NOTED_PART_KEYS)}, _TENSOR_TYPES)
    content = text_or([STRING, *any_kind(kinds, {**texts, **urls, "input_audio": audio}), *tensor])
    types = {"role": {"enum": list(_ROLES)}, "content": {"anyOf": [*content["anyOf"], {"type": "null"}]}}
    message = object_of(_MESSAGE_KEYS | _REPLY_KEYS | _NOTED_KEYS, types, ["role"])
    return {"type": "array", "minItems": 1, "items": message}


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
        # our own reply sent back: its text is the transcript; the samples of an earlier reply are not read
        content = spoken.get("transcript") if content is None else content
    if isinstance(content, str):
        return Message(_ROLES[role], [TextPart(_text(content, f"{field}.content"))], extra)
    if content is None and ("tool_calls" in extra or "reasoning_content" in extra):  # a reply may have no text
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
    if not isinstance(kind, str) or kind not in _PART_KEYS:
        hint = nearest(kind, _PART_KEYS) if isinstance(kind, str) else f"; known: {', '.join(_PART_KEYS)}"
        raise InvalidRequest(f"{field}.type is {shown(kind)}, no known part{hint}", field=f"{field}.type")
    _only(values, {"type", *_PART_KEYS[kind]}, field)
    if kind == "text":
        return TextPart(_text(values.get("text"), f"{field}.text"))
    if kind == "refusal":  # the assistant's text when it refused
        return TextPart(_text(values.get("refusal"), f"{field}.refusal"))
    if kind == EMBEDS:
        return _embedded(values.get("data"), policy, f"{field}.data", field)
    if kind == "input_audio":
        return _input_audio(values.get("input_audio"), policy, f"{field}.input_audio", field)
    if kind == TENSOR:
        return _tensor(values, policy, field)
    if kind in _URL_PARTS:
        return _url_part(_URL_PARTS[kind], values.get(kind), policy, f"{field}.{kind}", field)
    return _plain_part(_PLAIN_PARTS[kind], values, policy, field)


def appended_parts(content: object, policy: MediaPolicy, field: str) -> list[Part]:
    """Parse what is appended to a running request: a text, or a list of parts `text` and `tensor`. Raises
    `InvalidRequest` with the path of the wrong field."""
    if isinstance(content, str):
        content, at = [content], {0: field}
    elif isinstance(content, Sequence) and content:
        at = {index: f"{field}[{index}]" for index in range(len(content))}
    else:
        right = "it must be a text, or a list of at least one part"
        raise InvalidRequest(f"{field} is {shown(content)}; {right}", field=field)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind not in ("text", TENSOR):
            right = "only text and tensors can be appended"
            raise InvalidRequest(f"{at[index]}.type is {shown(kind)}; {right}", field=f"{at[index]}.type")
    made = [_part(part, policy, at[index]) for index, part in enumerate(content)]
    for index, part in enumerate(made):
        if isinstance(part, TextPart) and not part.text:
            raise InvalidRequest(f"{at[index]} is empty; it must have at least one character", field=at[index])
    return made


def _embedded(value: object, policy: MediaPolicy, field: str, part_field: str) -> TextPart:
    if value is None:
        raise InvalidRequest(f"{field} is missing; it must be base64 of a torch.save or safetensors file", field=field)
    data = from_base64(value, policy, field) if isinstance(value, str) else embeds_file(value, field)
    return TextPart("", data, part_field)


def _input_audio(value: object, policy: MediaPolicy, field: str, part_field: str) -> MediaPart:
    values = _object(value, field, 'an object with "data" (base64) and "format"')
    _only(values, set(_AUDIO_KEYS), field)
    name, data = values.get("format"), values.get("data")
    if name is not None and (not isinstance(name, str) or name not in _INPUT_AUDIO_FORMATS):
        hint = nearest(str(name), _INPUT_AUDIO_FORMATS)
        raise InvalidRequest(f"{field}.format is {shown(name)}, no known format{hint}", field=f"{field}.format")
    if not isinstance(data, str):
        raise InvalidRequest(
            f"{field}.data is {shown(data)}; it must be the base64 of an audio file", field=f"{field}.data"
        )
    return MediaPart("audio", from_base64(data, policy, f"{field}.data"), field=part_field)


def _tensor(values: Mapping[str, Any], policy: MediaPolicy, field: str) -> MediaPart:
    """A named tensor: nested lists or an array, or base64 of the bytes of an array with `dtype` and `shape`."""
    name, data = values.get("name"), values.get("data")
    if not isinstance(name, str) or not name or name in MEDIA or name == "text":
        raise InvalidRequest(f"{field}.name is {shown(name)}; it must be a tensor's name", field=f"{field}.name")
    if data is None:
        right = "nested lists of numbers, or base64 of the array's bytes"
        raise InvalidRequest(f"{field}.data is missing; it must be {right}", field=f"{field}.data")
    dtype, shape = values.get("dtype"), values.get("shape")
    if isinstance(data, str):
        data = from_base64(data, policy, f"{field}.data")
    if not isinstance(data, bytes):
        for key, value in (("dtype", dtype), ("shape", shape)):
            if value is not None:
                right = "left out: lists and arrays have their own"
                raise InvalidRequest(f"{field}.{key} is {shown(value)}; it must be {right}", field=f"{field}.{key}")
        part = named_tensor(data, name, field)
        check_size(len(part.data), policy, field)
        return part
    if dtype not in DTYPES:
        hint = nearest(str(dtype), DTYPES) if dtype is not None else f"; with base64 it is one of {', '.join(DTYPES)}"
        raise InvalidRequest(f"{field}.dtype is {shown(dtype)}{hint}", field=f"{field}.dtype")
    if not isinstance(shape, list | tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidRequest(f"{field}.shape is {shown(shape)}; it must be a list of sizes", field=f"{field}.shape")
    return MediaPart(name, data, ArrayInfo(dtype, tuple(shape)), field)


def tensors_from(given: Mapping[str, Any], policy: MediaPolicy, at: str) -> list[MediaPart]:
    """Parts of named tensors: name → nested lists, an array, or an object with `dtype`, `shape` and `data` in base64.
    Raises `InvalidRequest` naming `at` and the tensor."""
    made = []
    for name, data in given.items():
        values = data if isinstance(data, Mapping) else {"data": data}
        _only(values, set(_PART_KEYS[TENSOR]) - {"name"}, f"{at}[{name!r}]")
        made.append(_tensor({"name": name, **values}, policy, f"{at}[{name!r}]"))
    return made


def _url_part(kind: str, value: object, policy: MediaPolicy, field: str, part_field: str) -> MediaPart:
    if value is None:
        raise InvalidRequest(f"{field} is missing; the server stores no media, so send the data", field=field)
    values = _object(value, field, 'an object with "url"')
    _only(values, {"url", *_OF_URL.get(kind, ())}, field)
    detail = values.get("detail")
    if detail not in (None, "auto", "high"):
        right = "leave it out: images are always seen in full detail"
        raise InvalidRequest(f"{field}.detail is {shown(detail)}; {right}", field=f"{field}.detail")
    url = values.get("url")
    if not isinstance(url, str) or not url:
        right = "it must be a data: URL, an http(s) URL or a file path"
        raise InvalidRequest(f"{field}.url is {shown(url)}; {right}", field=f"{field}.url")
    frames = values.get("num_frames")
    if frames is not None and not (type(frames) is int and 1 <= frames < 1 << 31):
        raise InvalidRequest(
            f"{field}.num_frames is {shown(frames)}; it must be an integer from 1", field=f"{field}.num_frames"
        )
    return MediaPart(kind, read_source(url, policy, f"{field}.url"), field=part_field, frames=frames)


def _plain_part(kind: str, values: Mapping[str, Any], policy: MediaPolicy, field: str) -> MediaPart:
    """Parse transformers' `{"type": "image", "image": …}`; `url` and `path` are its other names for a source."""
    names = _PART_KEYS[kind]
    given = [name for name in names if values.get(name) is not None]
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "has no source"
        raise InvalidRequest(f"{field} {what}; give one of: {', '.join(names)}", field=f"{field}.{kind}")
    return part_of(kind, values[given[0]], policy, f"{field}.{given[0]}", field)


def part_of(kind: str, source: Any, policy: MediaPolicy, at: str, field: str | None = None) -> MediaPart:
    """Make a part of a URL, a path, the bytes of a file or an array; errors name `at`, the part's field is `field`."""
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


_TO_WORK_ON = ("image", "input_reference")
"""Names of input images without a special role."""
IMAGES = frozenset({"image", "mask_image", "image_reference", "last_image"})
"""Names of image arguments; `image` may be a list of several input images."""


def image_parts(given: Mapping[str, Any], policy: MediaPolicy) -> list[MediaPart]:
    """Make parts of images given by name, of which `image` may be a list: PIL images, arrays, paths, URLs or the bytes
    of files. Blocking (files, HTTP).

    Raises `InvalidRequest` naming the argument.
    """
    parts = []
    sources = sum(len(value) if isinstance(value, list | tuple) else value is not None for value in given.values())
    check_items(sources, policy, "image")
    policy = policy.begun()
    for name, value in given.items():
        if value is None:
            continue
        several = name == "image" and isinstance(value, list | tuple)
        for index, source in enumerate(value if several else [value]):
            part = part_of("image", source, policy, f"{name}[{index}]" if several else name)
            parts.append(msgspec.structs.replace(part, role="" if name in _TO_WORK_ON else name))
    return parts


def multi_modal_parts(data: object, policy: MediaPolicy) -> list[MediaPart]:
    """Make parts of media that are sent along with a prompt: kind → one medium or a list of several, each as in a part
    of a message. Blocking (files, HTTP).

    Frames in a list are one clip, and numbers in a list one recording. Raises `InvalidRequest` naming the medium.
    """
    values = _object(data, MULTI_MODAL_DATA, "an object: kind of media → one medium, or a list")
    given: list[tuple[str, str, Any]] = []
    for kind, value in values.items():
        at = f"{MULTI_MODAL_DATA}.{kind}"
        if kind not in _PLAIN_PARTS:
            raise InvalidRequest(f"{at}: no kind of media{nearest(str(kind), _PLAIN_PARTS)}", field=at)
        if isinstance(value, list) and not is_one(kind, value):
            given += [(_PLAIN_PARTS[kind], f"{at}[{index}]", source) for index, source in enumerate(value)]
        elif value is not None:
            given.append((_PLAIN_PARTS[kind], at, value))
    check_items(len(given), policy, MULTI_MODAL_DATA)
    policy = policy.begun()
    return [part_of(kind, source, policy, at) for kind, at, source in given]
