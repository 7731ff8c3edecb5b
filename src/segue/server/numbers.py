"""Numbers in a body that JSON, or this server, has none of: found and named."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from segue.messages.errors import InvalidRequest, shown

_LONGEST = 40
"""Digits of an integer; more are not made into one."""
_LEAST, _MOST = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class _NoNumber:
    written: str


def check_integers(values: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for a parameter that is an integer of more than 64 bits."""
    for name, value in values.items():
        if isinstance(value, int) and not _LEAST <= value <= _MOST:
            raise _too_large(name, value)


def unreadable_number(body: bytes) -> InvalidRequest | None:
    """What is wrong with a body that is JSON but for a number: NaN, Infinity, or one that no float holds. None where
    something else is wrong with it."""
    try:
        value = json.loads(body, parse_constant=_NoNumber, parse_float=_float, parse_int=_integer)
    except (ValueError, RecursionError):
        return None
    waiting: list[tuple[str, object]] = [("", value)]
    while waiting:
        path, one = waiting.pop()
        if isinstance(one, dict):
            waiting += [(f"{path}.{name}" if path else str(name), inner) for name, inner in one.items()]
        elif isinstance(one, list):
            waiting += [(f"{path}[{index}]", inner) for index, inner in enumerate(one)]
        elif isinstance(one, _NoNumber) and one.written[-1:].isalpha():
            return InvalidRequest(f"{path or 'the body'} is {one.written}, which JSON has not", field=path or None)
        elif isinstance(one, _NoNumber):
            return _too_large(path, one.written)
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
