"""Read a model's own examples, which the page offers: `examples/examples.json` in its directory, and its media."""

from __future__ import annotations

import base64
import logging
import os
import re
from pathlib import Path
from typing import Any

from segue.media.parts import messages_from
from segue.media.sources import MediaPolicy, read_path
from segue.messages.diffusion import SIZE
from segue.messages.errors import InvalidRequest, TooLarge, nearest, shown, wrong
from segue.orchestrator.service import ModelCard
from segue.server.http.body import decode_json
from segue.server.settings import ServerSettings

MOST_BYTES = 4 << 20
"""Of `examples.json` and all media that it names, together."""
_NAME = re.compile(r"[^/\\\x00-\x1f]+\.(\w+)")
_TYPES = {
    "image": {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "webp": "image/webp", "gif": "image/gif"},
    "video": {"mp4": "video/mp4", "webm": "video/webm"},
    "audio": {"wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "ogg": "audio/ogg"},
}
"""Kind of medium → suffix of a file's name → media type."""
_PARTS = {"image_url": "image", "video_url": "video", "input_audio": "audio"}
"""Type of a content part → its kind of medium."""
_TEXTS = ("title", "prompt", "answer")
_FIELDS = (*_TEXTS, "messages", "image", "size", "steps")

_log = logging.getLogger("segue.server")


def read_examples(card: ModelCard, settings: ServerSettings) -> list[dict[str, Any]]:
    """The examples, with their media in them. Wrong ones are logged and left out. Blocking."""
    file = Path(card.root, "examples", "examples.json")
    if not card.root or not os.path.lexists(file):
        return []
    folder = _Folder(file.parent, card.takes)
    examples: list[dict[str, Any]] = []
    try:
        given = decode_json(folder.read(file.name, "the file"), settings.limits)
        if not isinstance(given, list):
            raise wrong("the file's content", given, "a list of examples")
    except InvalidRequest as error:
        _log.warning("%s: no example is offered: %s", file, error)
        return []
    for index, example in enumerate(given):
        left = folder.left
        try:
            examples.append(_filled(example, folder, settings.media))
        except InvalidRequest as error:
            folder.left = left
            _log.warning("%s: example %d is left out: %s", file, index, error)
    return examples


class _Folder:
    """The folder of a model's examples. `left`: how many bytes may yet be read."""

    def __init__(self, path: Path, takes: frozenset[str]) -> None:
        self.left = MOST_BYTES
        self._path, self._takes = path, takes
        model = Path(os.path.realpath(path.parent))
        self._homes = [model / path.name]
        if model.parent.name == "snapshots":  # in the hub's cache, a model's files are links to its blobs
            self._homes.append(model.parent.parent / "blobs")

    def read(self, name: str, field: str) -> bytes:
        """The bytes of a file. Raises `InvalidRequest`."""
        path = self._path / name
        if not any(Path(os.path.realpath(path)).is_relative_to(home) for home in self._homes):
            raise wrong(field, name, "a file of this folder, and no link to another place")
        try:
            data = read_path(path, MediaPolicy(allow_paths=True, max_bytes=self.left), field)
        except TooLarge as error:
            right = f"at most {MOST_BYTES} bytes, together with the files before it"
            raise TooLarge(f"{field} is {shown(name)}, too large a file; it must have {right}", field=field) from error
        self.left -= len(data)
        return data

    def medium(self, name: object, kind: str, field: str) -> str:
        """The data URL of an image, audio or video file. Raises `InvalidRequest`."""
        named = _NAME.fullmatch(name) if isinstance(name, str) else None
        if named is None or (media_type := _TYPES[kind].get(named[1].lower())) is None:
            raise wrong(field, name, f"the name of a file beside examples.json ({', '.join(_TYPES[kind])})")
        if kind not in self._takes:
            takes = ", ".join(sorted(self._takes))
            raise InvalidRequest(f"{field} is {shown(name)}, but this model takes only: {takes}", field=field)
        return f"data:{media_type};base64,{base64.b64encode(self.read(named[0], field)).decode()}"


def _filled(example: Any, folder: _Folder, policy: MediaPolicy) -> dict[str, Any]:
    """An example, in which data has taken the place of names. Raises `InvalidRequest`."""
    if not isinstance(example, dict):
        raise wrong("it", example, "an object")
    for name, value in example.items():
        if name not in _FIELDS:
            raise InvalidRequest(f"it has no field {shown(name)}{nearest(name, _FIELDS)}", field=name)
        if name in _TEXTS and not (isinstance(value, str) and value.strip()):
            raise wrong(name, value, "a text")
    messages = example.get("messages")
    if "title" not in example or ("messages" in example) == ("prompt" in example):
        raise InvalidRequest(f"it has {', '.join(example) or 'nothing'}; it must have title, and messages or prompt")
    if "image" in example:
        if "messages" in example:
            raise InvalidRequest("image is given with messages; there, images are parts of the content", field="image")
        example["image"] = folder.medium(example["image"], "image", "image")
    size, steps = example.get("size", "1x1"), example.get("steps", 1)
    if not (isinstance(size, str) and SIZE.fullmatch(size)):
        raise wrong("size", size, "WIDTHxHEIGHT in pixels, e.g. 1024x1024")
    if type(steps) is not int or steps < 1:
        raise wrong("steps", steps, "a whole number from 1 on")
    if "messages" in example:
        for index, message in enumerate(messages if isinstance(messages, list) else ()):
            _fill(message, folder, f"messages[{index}].content")
        messages_from(messages, policy)
    return example


def _fill(message: Any, folder: _Folder, field: str) -> None:
    """Put data in place of the names in a message's content. `messages_from` checks all else."""
    content = message.get("content") if isinstance(message, dict) else None
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", *_PARTS):
            raise wrong(f"{field}[{index}].type", kind, f"one of text, {', '.join(_PARTS)}")
        inner = part.get(kind)
        if kind == "text" or not isinstance(inner, dict):
            continue
        key = "data" if kind == "input_audio" else "url"
        url = folder.medium(inner.get(key), _PARTS[kind], f"{field}[{index}].{kind}.{key}")
        if kind == "input_audio":
            inner.setdefault("format", inner[key].rpartition(".")[2].lower())
            url = url.partition(",")[2]
        inner[key] = url
