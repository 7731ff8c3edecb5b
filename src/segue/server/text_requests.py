"""Texts, or their ids, that become a vector or classes: what a body says of them, and a generation for each."""

from __future__ import annotations

import base64
import time
import uuid
from typing import Any, Protocol

import msgspec
import numpy as np

from segue.messages.errors import InvalidRequest, shown, wrong
from segue.messages.request import Request
from segue.messages.sampling import SIDES
from segue.orchestrator.service import ModelCard
from segue.server.errors import Unsupported
from segue.server.parameters import checked_token_ids, turn_fields

MAX_INPUTS = 2048
"""OpenAI's."""
FORMATS = ("float", "base64")
"""How a list of numbers is written."""


class TextsBody(msgspec.Struct, kw_only=True):
    """What all of them have. null means not given."""

    model: str
    input: str | list[str | int | list[int]]
    user: str | None = None
    """The tenant, for fair scheduling."""
    # ours (and vLLM's) from here on
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int | None = None
    deadline: float | None = None
    """Seconds from now."""


class Cutting(Protocol):
    """A body whose texts may be cut."""

    truncate_prompt_tokens: int | None
    truncation_side: str | None


def cut_options(body: Cutting, card: ModelCard) -> dict[str, Any]:
    """Options of a request whose text is to be cut. Raises `InvalidRequest`."""
    given = {"truncate_prompt_tokens": body.truncate_prompt_tokens, "truncation_side": body.truncation_side}
    options = {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        if name not in card.options:
            raise Unsupported(f"{name} is {shown(value)}; this model's texts cannot be cut: leave it out", field=name)
    if body.truncation_side is not None and body.truncation_side not in SIDES:
        raise wrong("truncation_side", body.truncation_side, " or ".join(SIDES))
    most = body.truncate_prompt_tokens
    if most is not None and not (most == -1 or 1 <= most < 1 << 31):
        raise wrong("truncate_prompt_tokens", most, "at least 1, or -1 for what the model takes")
    return options


def text_requests(
    body: TextsBody, prefix: str, modality: str, options: dict[str, Any], card: ModelCard
) -> list[Request]:
    """One per text. `prefix`: of their ids. Raises `InvalidRequest` naming the parameter, its value and what would be
    right."""
    options = {**options, **cut_options(body, card)}
    turn = turn_fields(body.priority, body.user, body.deadline, time.time())
    texts = texts_of(body.input, "input")
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(f"input has {len(texts)} entries; there may be {MAX_INPUTS}", field="input")
    return [
        Request(
            request_id=f"{prefix}-{uuid.uuid4().hex}",
            prompt=text if isinstance(text, str) else None,
            prompt_token_ids=None if isinstance(text, str) else text,
            add_special_tokens=body.add_special_tokens,
            modalities=[modality],
            options=options,
            **turn,
        )
        for text in texts
    ]


def written_as_base64(encoding_format: str | None) -> bool:
    """Whether numbers are written so, and not as such. Raises `InvalidRequest`."""
    if encoding_format is not None and encoding_format not in FORMATS:
        raise wrong("encoding_format", encoding_format, " or ".join(FORMATS))
    return encoding_format == "base64"


def written_numbers(data: bytes, *, as_base64: bool) -> str | list[float]:
    """Little-endian float32 as such, which numpy of the official client reads, or as numbers."""
    return base64.b64encode(data).decode() if as_base64 else np.frombuffer(data, dtype="<f4").tolist()


def texts_of(given: str | list[str | int | list[int]], field: str) -> list[str | list[int]]:
    """One text, several, the ids of one, or the ids of several: an entry for each. Raises `InvalidRequest`."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest(f"{field} is empty; give at least one text", field=field)
    ids = [entry for entry in given if isinstance(entry, int)]
    if len(ids) == len(given):
        return [checked_token_ids(ids, field)]
    texts: list[str | list[int]] = []
    for index, entry in enumerate(given):
        if isinstance(entry, int) or type(entry) is not type(given[0]):
            raise InvalidRequest(
                f"{field}[{index}] is {shown(entry)}; all entries must be texts, or all lists of ids, or all ids",
                field=f"{field}[{index}]",
            )
        texts.append(checked_token_ids(entry, f"{field}[{index}]") if isinstance(entry, list) else entry)
    return texts
