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


def remarks(text: str) -> list[dict[str, Any]]:
    """What a judge says, as a message to the model that it judges."""
    return [{"role": "user", "content": "!" + text}]


def unsettled(request: Any, outcome: Any) -> bool:
    """Whether a judge wants another draft."""
    if request.options.get("fail_at") == "condition":
        raise LookupError("told to break")
    assert outcome.text == answer_of(outcome)
    return sum(map(ord, outcome.text)) % 3 != 0


def answer_of(outcome: Any) -> str:
    from segue_toy.stages import text_of

    return text_of([token for token in outcome.token_ids if token])
