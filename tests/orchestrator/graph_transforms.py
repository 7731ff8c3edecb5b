"""Transforms of a graph of toys. What a toy answers depends on the last letter of its prompt."""

from __future__ import annotations

from typing import Any

from toy_system import answer


def judged(text: str) -> Any:
    """Backwards; but some answers make it fail."""
    if text == answer("F"):
        raise ValueError("told to fail")
    if text == answer("N"):
        return None
    return 7 if text == answer("O") else text[::-1]


def as_messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "<"}, {"role": "user", "content": text}]


def doubled(text: str) -> str:
    return text + text
