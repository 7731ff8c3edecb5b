"""Reads a request's body within limits, decodes it, and converts it to a typed value; errors name path and value.

`check_structure` counts a JSON text's values and nesting depth from its bytes, before decoding: decoding a list of
empty lists takes 10 times its memory, and holds the interpreter's lock. `unreadable_number` finds and names a number
that JSON or this server does not allow.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi import Request
from starlette.requests import ClientDisconnect

from segue.messages.errors import LONGEST_NAME, Cancelled, InvalidRequest, TooLarge, nearest, shown
from segue.messages.limits import RequestLimits, check_lists
from segue.server.http.errors import Unsupported, UnsupportedMediaType, UploadTimeout
from segue.server.settings import ServerSettings

_LONGEST = 40
"""Most digits of an integer; longer ones are not converted."""
_LEAST, _MOST = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class _NoNumber:
    written: str


def check_integers(values: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for an integer parameter of more than 64 bits."""
    for name, value in values.items():
        if isinstance(value, int) and not _LEAST <= value <= _MOST:
            raise _too_large(name, value)


def unreadable_number(body: bytes) -> InvalidRequest | None:
    """The error for a body whose only fault is a number: NaN, Infinity, or one that does not fit a float. None if the
    fault is another."""
    try:
        found = _first(json.loads(body, parse_constant=_NoNumber, parse_float=_float, parse_int=_integer))
    except (ValueError, RecursionError):
        return None
    if found is None:
        return None
    steps, number = found
    path = "".join(reversed(steps)).removeprefix(".")[:LONGEST_NAME]
    if number.written[-1:].isalpha():
        return InvalidRequest(f"{path or 'the body'} is {number.written}, which is not JSON", field=path or None)
    return _too_large(path, number.written)


def _first(value: object) -> tuple[list[str], _NoNumber] | None:
    """(path to the first such number, last step first; the number). Only that path is built: a body of a megabyte may
    have half a million values under a name of half a megabyte."""
    if isinstance(value, _NoNumber):
        return [], value
    if isinstance(value, dict):
        for name, inner in value.items():
            if (found := _first(inner)) is not None:
                found[0].append(f".{name[:LONGEST_NAME]}")
                return found
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            if (found := _first(inner)) is not None:
                found[0].append(f"[{index}]")
                return found
    return None


def _too_large(path: str, written: object) -> InvalidRequest:
    return InvalidRequest(
        f"{path or 'the body'} is {shown(written)}, a number that is too large: all numbers have 64 bits",
        field=path or None,
    )


def _float(text: str) -> float | _NoNumber:
    number = float(text)
    return number if math.isfinite(number) else _NoNumber(text)


def _integer(text: str) -> int | _NoNumber:
    return int(text) if len(text) <= _LONGEST else _NoNumber(text)


_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_structure(body: bytes, limits: RequestLimits) -> None:
    """Raise `InvalidRequest` for more values, or deeper nesting, than `limits` allow. Text that is not JSON may
    pass."""
    most, deepest = limits.max_json_values, limits.max_json_depth
    opened = body.count(b"[") + body.count(b"{")
    if opened <= deepest and opened + body.count(b",") < most:
        return  # few enough even if those inside strings count
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 4 * most:  # each string has two quotes; a member is at most two strings
        raise InvalidRequest(f"the body has more than {most} JSON values (limits.max_json_values)")
    outside = b"".join(body.split(b'"')[::2])
    values = outside.count(b",") + outside.count(b"[") + outside.count(b"{")
    if values > most:
        raise InvalidRequest(f"the body has {values} JSON values; at most {most} are taken (limits.max_json_values)")
    brackets = np.frombuffer(outside.translate(None, delete=_NOT_BRACKETS), np.uint8)
    # 0x5b [  0x5d ]  0x7b {  0x7d }: the opening ones have bit 1 set
    depth = int(np.cumsum(np.where(brackets & 2, 1, -1)).max(initial=0))
    if depth > deepest:
        raise InvalidRequest(
            f"the body is nested too deeply: {depth} levels; at most {deepest} are taken (limits.max_json_depth)"
        )


T = TypeVar("T")

_LARGE = 1 << 20
_READ_AGAIN = 1 << 16
"""Largest body that is decoded again, far more slowly, to name its invalid number."""


async def read_json(request: Request, settings: ServerSettings, right: str = "application/json") -> dict[str, Any]:
    """The JSON object of a request. `right`: the allowed Content-Type. Raises `InvalidRequest`, and as `read_body`."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json" and not declared.endswith("+json"):
        # this check also keeps web pages of other origins from posting here without a preflight request
        said = f"is {shown(declared)}" if declared else "is missing"
        raise UnsupportedMediaType(f"Content-Type {said}; it must be {right}")
    body = await read_body(request, settings)
    # decoding a large body (base64 of a video) takes tens of milliseconds: other clients' events go out meanwhile
    limits = settings.limits
    value = decode_json(body, limits) if len(body) < _LARGE else await asyncio.to_thread(decode_json, body, limits)
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is {shown(value)}; it must be a JSON object")
    check_lists(value, limits)
    return value


def decode_json(body: bytes, limits: RequestLimits) -> Any:
    """The value of a JSON text within limits. Raises `InvalidRequest`."""
    check_structure(body, limits)
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        number = unreadable_number(body) if len(body) < _READ_AGAIN else None
        raise number or InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """Read the body's bytes.

    A body over the limit is read and discarded, up to the same size again, so that the client reads the answer instead
    of failing to write; a client that declares more than that is answered at once.

    Raises `TooLarge` above `max_body_bytes`; `UploadTimeout` if the body does not arrive within `upload_seconds`, or
    arrives more slowly than `upload_rate` after `upload_grace`; `Busy` if the bodies of all requests together exceed
    `max_bodies_bytes`; and `UnsupportedMediaType` if it is compressed.
    """
    check_uncompressed(request)
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and int(declared[:20]) > 2 * limit:
        raise TooLarge(f"the body has {declared} bytes; at most {limit} are taken (max_body_bytes)")
    pieces: list[bytes] = []
    size = 0
    began = asyncio.get_running_loop().time()
    last, grace = began + settings.upload_seconds, min(settings.upload_grace, settings.upload_seconds)
    try:
        async with asyncio.timeout(grace) as due:
            async for piece in request.stream():
                size += len(piece)
                due.reschedule(min(last, began + grace + size / settings.upload_rate))
                if size <= limit:
                    pieces.append(piece)
                else:
                    pieces.clear()
                if size > 2 * limit:
                    break
    except TimeoutError as error:
        if grace < settings.upload_seconds and (due.when() or last) < last:
            raise UploadTimeout("body", grace, settings.upload_rate) from error
        raise UploadTimeout("body", settings.upload_seconds) from error
    except ClientDisconnect as error:
        raise Cancelled("the client disconnected while sending its request") from error
    if size > limit:
        raise TooLarge(f"the body is larger than {limit} bytes (max_body_bytes)")
    return b"".join(pieces)


def check_uncompressed(request: Request) -> None:
    """Raise `UnsupportedMediaType` for a compressed body."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding is {shown(coding)}; send the body as it is")


def check_names(
    values: Mapping[str, Any], known: Iterable[str], where: str = "", *, offered: Iterable[str] | None = None
) -> None:
    """Raise `InvalidRequest` for an unknown name, with its nearest neighbour. `offered`: the names to suggest, if not
    all."""
    names = frozenset(known)
    for name in values:
        if name not in names:
            place = f"{where}." if where else ""
            raise InvalidRequest(
                f"unknown parameter {shown(place + name)}{nearest(name, names if offered is None else offered)}",
                field=f"{place}{name}",
            )


def check_unsupported(
    values: Mapping[str, Any], unsupported: Mapping[str, tuple[object, ...]], where: str = ""
) -> None:
    """Raise `Unsupported` for known parameters without support. `unsupported`: names → values that have no effect (null
    always does)."""
    for name, harmless in unsupported.items():
        value, at = values.get(name), f"{where}.{name}" if where else name
        # compare types too: True == 1 in Python
        if value is not None and not any(value == given and type(value) is type(given) for given in harmless):
            right = f"leave it out or use {' or '.join(map(repr, harmless))}" if harmless else "leave it out"
            raise Unsupported(f"{at} is {shown(value)}; this server does not support that: {right}", field=at)


_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]|\[(?P<any>\.\.\.)\]")


def convert(values: dict[str, Any], kind: type[T]) -> T:
    """Convert `values` to `kind`; an error about a type names path and value."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        match = _AT.match(str(error))
        assert match is not None
        what = match["what"].replace(" | null", "").replace("`", "")
        field = (match["path"] or "").lstrip(".").replace("[...]", "")
        if not field:
            missing = re.search(r"missing required field (\w+)", what)
            name = missing[1] if missing else None
            raise InvalidRequest(f"{name} is missing" if name else what, field=name) from error
        value = _value_at(values, match["path"])
        raise InvalidRequest(f"{field} is {shown(value)}: {what[:1].lower()}{what[1:]}", field=field) from error
    except OverflowError as error:
        raise InvalidRequest(f"a number in the body is too large: {error}") from error


def _value_at(value: Any, path: str) -> Any:
    """The value at a path of msgspec's; if the path does not name the entry, its container."""
    for step in _STEP.finditer(path):
        if step["any"]:
            break
        value = value[step["name"]] if step["name"] else value[int(step["index"])]
    return value
