"""A request's body: read within a limit, decoded, and made into a typed value with errors that name path and value."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from segue.messages.errors import Cancelled, InvalidRequest, TooLarge, nearest, shown
from segue.server.errors import Unsupported, UnsupportedMediaType, UploadTimeout
from segue.server.numbers import unreadable_number
from segue.server.settings import ServerSettings

T = TypeVar("T")

_LARGE = 1 << 20


async def read_json(request: Request, settings: ServerSettings, right: str = "application/json") -> dict[str, Any]:
    """The JSON object of a request; `right`: what its Content-Type may be. Raises `InvalidRequest`, and as
    `read_body`."""
    declared = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if declared != "application/json" and not declared.endswith("+json"):
        # also what keeps a web page of another origin from posting here without asking first
        raise UnsupportedMediaType(f"Content-Type is {shown(declared)}; it must be {right}")
    body = await read_body(request, settings)
    # a large body (base64 of a video) takes tens of milliseconds: other clients' events go out meanwhile
    value = _decode(body) if len(body) < _LARGE else await asyncio.to_thread(_decode, body)
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is {shown(value)}; it must be a JSON object")
    return value


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        number = unreadable_number(body) if len(body) < _LARGE else None
        raise number or InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """The body, whatever it is. What is over the limit is read on and dropped (up to as much again), so that the client
    gets to reading the answer instead of failing to write; who declares more than that is not waited for.

    Raises `TooLarge` above `max_body_bytes`, `UploadTimeout` where it has not come within `upload_seconds`, and
    `UnsupportedMediaType` for one that is compressed.
    """
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding is {shown(coding)}; send the body as it is")
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and int(declared[:20]) > 2 * limit:
        raise TooLarge(f"the body has {declared} bytes; at most {limit} are taken (max_body_bytes)")
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.upload_seconds):
            async for piece in request.stream():
                size += len(piece)
                if size <= limit:
                    pieces.append(piece)
                else:
                    pieces.clear()
                if size > 2 * limit:
                    break
    except TimeoutError as error:
        raise UploadTimeout("body", settings.upload_seconds) from error
    except ClientDisconnect as error:
        raise Cancelled("the client went away while sending its request") from error
    if size > limit:
        raise TooLarge(f"the body is larger than {limit} bytes (max_body_bytes)")
    return b"".join(pieces)


def check_names(
    values: Mapping[str, Any], known: Iterable[str], where: str = "", *, offered: Iterable[str] | None = None
) -> None:
    """Raise `InvalidRequest` for a name that is not known, with its nearest neighbour; `offered`: those that are worth
    naming, where not all are."""
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
    """Raise `Unsupported` for what is known and cannot be honoured. `unsupported`: names → the values that ask for
    nothing (null always does)."""
    for name, harmless in unsupported.items():
        value, at = values.get(name), f"{where}.{name}" if where else name
        # True == 1 in Python: compare types as well
        if value is not None and not any(value == given and type(value) is type(given) for given in harmless):
            right = f"leave it out or use {' or '.join(map(repr, harmless))}" if harmless else "leave it out"
            raise Unsupported(f"{at} is {shown(value)}; this server does not support that: {right}", field=at)


_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]|\[(?P<any>\.\.\.)\]")


def convert(values: dict[str, Any], kind: type[T]) -> T:
    """`values` as `kind`; a wrong type is named with its path and value."""
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
    """What stands at a path of msgspec's; where it does not say which entry, the container."""
    for step in _STEP.finditer(path):
        if step["any"]:
            break
        value = value[step["name"]] if step["name"] else value[int(step["index"])]
    return value
