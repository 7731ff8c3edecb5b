"""Metadata of the shared-memory connector: the place of a payload, or the payload itself."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from segue.connectors.payload import PayloadError

_WIRE = (bytes,)
"""Types that msgpack carries directly: by default, `to_builtins` turns bytes into base64 text."""


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
    """Convert metadata to the dict that travels."""
    return msgspec.to_builtins(found, builtin_types=_WIRE)


def read(metadata: dict[str, Any] | None, place: str) -> Inline | Placed:
    """Parse the dict that `written` made. Raises `PayloadError` for any other; `place` names the payload in errors."""
    try:
        return msgspec.convert(metadata, Inline | Placed)
    except msgspec.ValidationError as error:
        raise PayloadError(f"{place} came with broken metadata: {error}", field="metadata") from error
