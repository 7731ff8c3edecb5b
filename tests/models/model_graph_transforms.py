"""Functions that graphs of models name, right and wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def upper(text: str) -> str:
    return text.upper()


def of_samples(samples: Any, rate: float) -> Any:
    return samples


async def later(text: str) -> str:
    return text


def one_by_one(text: str) -> Iterator[str]:
    yield text


def nested() -> Any:
    def inner(text: str) -> str:
        return text

    return inner
