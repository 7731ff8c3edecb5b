"""Parses a body of `multipart/form-data` (RFC 7578) into fields and files, within limits."""

from __future__ import annotations

import asyncio
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import msgspec
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from segue.messages.errors import InvalidRequest, shown
from segue.messages.limits import check_lists
from segue.server.http.body import read_body, read_json
from segue.server.settings import ServerSettings

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 512
_NAME = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<key>[^\[\]]*)\])?")


@dataclass(frozen=True, slots=True)
class FormPart:
    """One field or file."""

    name: str
    """As written in the form: `image[]`."""
    data: bytes
    is_file: bool


async def read_values(
    request: Request, settings: ServerSettings, kind: type[msgspec.Struct], files: frozenset[str]
) -> dict[str, Any]:
    """The values of a JSON object or of a form, by name. Raises `InvalidRequest`, and as `read_body`.

    In a form, the fields in `files` are bytes (text if they are not files), and the texts of other fields are converted
    to the type of `kind`'s field: numbers, booleans, lists. `name[]`, and a repeated name, is a list; `name[key]` is an
    entry of an object.
    """
    declared = request.headers.get("content-type", "")
    if declared.partition(";")[0].strip().lower() != "multipart/form-data":
        return await read_json(request, settings, "application/json or multipart/form-data")
    body = await read_body(request, settings)
    parts = await asyncio.to_thread(parse_multipart, body, declared)
    values = form_values(parts, kind, files)
    check_lists(values, settings.limits)
    return values


def parse_multipart(body: bytes, content_type: str) -> list[FormPart]:
    """The parts in order. Raises `InvalidRequest`."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidRequest("the body is multipart/form-data, but its Content-Type names no boundary")
    form = _Form()
    try:
        MultipartParser(boundary, form.callbacks()).write(body)
    except FormParserError as error:
        raise InvalidRequest(f"the body is not multipart/form-data: {error}") from error
    if not form.over:
        raise InvalidRequest("the form breaks off: its last boundary is missing")
    return form.parts


class _Form:
    """The parser's state."""

    def __init__(self) -> None:
        self.parts: list[FormPart] = []
        self.over = False
        self._field = b""
        self._value = b""
        self._head: dict[bytes, bytes] = {}
        self._data = bytearray()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._part_data,
            "on_part_end": self._end,
            "on_end": self._last,
        }

    def _begin(self) -> None:
        if len(self.parts) == MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts")
        self._head, self._data = {}, bytearray()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._head[self._field.lower()] = self._value
        self._field = self._value = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]

    def _end(self) -> None:
        kind, options = parse_options_header(self._head.get(b"content-disposition"))
        name = options.get(b"name")
        if kind != b"form-data" or not name:
            raise InvalidRequest("a part of the form has no Content-Disposition: form-data with a name")
        try:
            self.parts.append(FormPart(name.decode(), bytes(self._data), b"filename" in options))
        except UnicodeDecodeError as error:
            raise InvalidRequest("a name in the form is not UTF-8 text") from error

    def _last(self) -> None:
        self.over = True


def form_values(parts: list[FormPart], kind: type[msgspec.Struct], files: frozenset[str]) -> dict[str, Any]:
    """Values by name, as a JSON body has them. Raises `InvalidRequest`."""
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for part in parts:
        match = _NAME.fullmatch(part.name)
        if match is None:
            raise InvalidRequest(f"the form has a field {shown(part.name)}, which is not a valid name")
        name, key = match["name"], match["key"]
        if part.is_file and name not in files:
            raise InvalidRequest(f"{name} is a file; it must be text", field=name)
        value = part.data if part.is_file else _value(name, part.data, hints)
        if key:
            held = values.setdefault(name, {})
            if not isinstance(held, dict):
                raise InvalidRequest(f"{name} is given as a value and as an object", field=name)
            held[key] = value
        elif name in values or key == "":
            held = values.setdefault(name, [])
            values[name] = [*held, value] if isinstance(held, list) else [held, value]
        else:
            values[name] = value
    return values


def _value(name: str, data: bytes, hints: Mapping[str, Any]) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8 text", field=name) from error
    if name not in hints or _takes_text(hints[name]):
        return text
    try:
        return msgspec.json.decode(data.lower() if data in (b"True", b"False") else data)
    except msgspec.DecodeError:
        return text  # the check of its type names the error


def _takes_text(hint: Any) -> bool:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return any(one is str for one in typing.get_args(hint))
    return hint is str or hint is Any
