"""Metadata of the shared-memory connector: where a payload is, or the payload itself."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from segue.connectors.payload import PayloadError

_WIRE = (bytes,)
"""Types that msgpack carries as they are: `to_builtins` would make base64 text of bytes."""


class Inline(msgspec.Struct, frozen=True, tag_field="kind", tag="inline"):
    pool: bytes
    number: int
    data: bytes


class OnDevice(msgspec.Struct, frozen=True):
    handle: bytes
    offset: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    size: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]


class Placed(msgspec.Struct, frozen=True, tag_field="kind", tag="slot"):
    address: str
    pool: bytes
    segment: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    page: Annotated[int, msgspec.Meta(ge=0)]
    generation: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
    size: Annotated[int, msgspec.Meta(ge=0)]
    region: OnDevice | None = None


def written(found: Inline | Placed) -> dict[str, Any]:
    """As it travels."""
    return msgspec.to_builtins(found, builtin_types=_WIRE)


def read(metadata: dict[str, Any] | None, place: str) -> Inline | Placed:
    """What `written` gave. Raises `PayloadError` for anything else; `place`: which payload it came with."""
    try:
        return msgspec.convert(metadata, Inline | Placed)
    except msgspec.ValidationError as error:
        raise PayloadError(f"{place} came with broken metadata: {error}", field="metadata") from error
