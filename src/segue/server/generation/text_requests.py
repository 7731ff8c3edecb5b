"""Requests whose texts become vectors, classes or scores: their parameters, and a generation for each text.

A limited number of texts runs concurrently.
"""

from __future__ import annotations

import base64
import time
import uuid
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from segue.messages.deltas import ClassesDelta, EmbeddingDelta, Finished, ScoreDelta
from segue.messages.errors import InvalidRequest, StageFailed, shown, wrong
from segue.messages.request import Request
from segue.messages.sampling import SIDES
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import ModelCard, Service
from segue.server.generation.generations import run_generations
from segue.server.generation.parameters import checked_token_ids, turn_fields
from segue.server.http.errors import Unsupported

AT_ONCE = 32
"""Most texts of one request in the stages at a time, so that a long list leaves capacity for other requests."""

D = TypeVar("D", ClassesDelta, EmbeddingDelta, ScoreDelta)


async def pooled(
    requests: list[Request], kind: type[D], field: str, service: Service, metrics: ServerMetrics
) -> tuple[list[D], int]:
    """(result of each request, prompt tokens of all). An error about a text names `field`, the client's name for it."""
    found: dict[int, D] = {}
    tokens = 0
    try:
        async with aclosing(run_generations(service, requests, metrics, {}, at_once=AT_ONCE)) as deltas:
            async for index, delta in deltas:
                if isinstance(delta, kind):
                    found[index] = delta
                elif isinstance(delta, Finished):
                    tokens += delta.usage.prompt_tokens
    except InvalidRequest as error:
        if error.field is not None and error.field.startswith("prompt"):
            error.field = field
        elif error.field is not None:  # an option of the request is a parameter of the body
            error.field = error.field.removeprefix("options.")
        raise
    if len(found) != len(requests):
        missing = next(index for index in range(len(requests)) if index not in found)
        raise StageFailed(f"{field}: text {missing} has no result")
    return [found[index] for index in range(len(requests))], tokens


FORMATS = ("float", "base64")
"""Encodings of a list of numbers."""


class TextsBody(msgspec.Struct, kw_only=True):
    """Parameters that all these endpoints share. null means not given."""

    model: str = ""
    input: str | list[str | int | list[int]]
    user: str | None = None
    """The tenant, for fair scheduling."""
    # additional (and vLLM's)
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int | None = None
    deadline: float | None = None
    """Seconds from now."""


class Cutting(Protocol):
    """A body with truncation parameters."""

    truncate_prompt_tokens: int | None
    truncation_side: str | None


def cut_options(body: Cutting, card: ModelCard) -> dict[str, Any]:
    """Truncation options of a request. Raises `InvalidRequest`."""
    given = {"truncate_prompt_tokens": body.truncate_prompt_tokens, "truncation_side": body.truncation_side}
    options = {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        if name not in card.options:
            raise Unsupported(f"{name} is {shown(value)}; this model cannot truncate texts: leave it out", field=name)
    if body.truncation_side is not None and body.truncation_side not in SIDES:
        raise wrong("truncation_side", body.truncation_side, " or ".join(SIDES))
    most = body.truncate_prompt_tokens
    if most is not None and not (most == -1 or 1 <= most < 1 << 31):
        raise wrong("truncate_prompt_tokens", most, "at least 1, or -1 for the model's limit")
    return options


def text_requests(
    body: TextsBody, prefix: str, modality: str, options: dict[str, Any], card: ModelCard
) -> list[Request]:
    """One request per text. `prefix`: of their ids. Raises `InvalidRequest` with parameter, value and remedy."""
    options = {**options, **cut_options(body, card)}
    turn = turn_fields(body.priority, body.user, body.deadline, time.time(), card)
    texts = texts_of(body.input, "input")
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
    """Whether the client wants base64 instead of numbers. Raises `InvalidRequest`."""
    if encoding_format is not None and encoding_format not in FORMATS:
        raise wrong("encoding_format", encoding_format, " or ".join(FORMATS))
    return encoding_format == "base64"


def written_numbers(data: bytes, *, as_base64: bool) -> str | list[float]:
    """Encode little-endian float32 as base64, which OpenAI's client decodes with numpy, or as numbers."""
    return base64.b64encode(data).decode() if as_base64 else np.frombuffer(data, dtype="<f4").tolist()


def texts_of(given: str | list[str | int | list[int]], field: str) -> list[str | list[int]]:
    """A list with one entry per text, from a text, texts, the ids of one or of several. Raises `InvalidRequest`."""
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
