"""POST /v1/embeddings, as OpenAI has it: texts or ids in, vectors out."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response

from segue.media.sources import shown
from segue.messages.deltas import EmbeddingDelta
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import ModelCard, Service
from segue.server.body import read_json
from segue.server.disconnect import while_connected
from segue.server.errors import Unsupported, json_response
from segue.server.parameters import check_model, checked_token_ids, parse_body, turn_fields
from segue.server.pooled import pooled
from segue.server.settings import ServerSettings

MAX_INPUTS = 2048
"""OpenAI's."""
_FORMATS = ("float", "base64")


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """Every parameter that does something. null means not given."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    """The tenant, for fair scheduling."""
    # ours (and vLLM's) from here on
    add_special_tokens: bool | None = None
    priority: int | None = None
    deadline: float | None = None
    """Seconds from now."""


@dataclass(frozen=True)
class EmbeddingsRequest:
    """A checked request: one generation per text."""

    model: str
    requests: list[Request]
    as_base64: bool


def add_embeddings(app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics) -> None:
    """Add the endpoint."""

    @app.post("/v1/embeddings")
    async def embed(request: HttpRequest) -> Response:
        values = await read_json(request, settings)
        asked = embeddings_request(values, service.card, settings)
        return json_response(await while_connected(request.receive, _answer(asked, service, metrics)))


def embeddings_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> EmbeddingsRequest:
    """Raises `InvalidRequest` naming the parameter, its value and what would be right."""
    body = parse_body(values, EmbeddingsBody, {}, {})
    check_model(body.model, card, settings)
    if "embedding" not in card.gives:
        raise Unsupported(
            "this model gives no embeddings; this server does not support that endpoint for it", field="model"
        )
    if body.encoding_format is not None and body.encoding_format not in _FORMATS:
        raise InvalidRequest(
            f"encoding_format is {shown(body.encoding_format)}; it must be float or base64", field="encoding_format"
        )
    if body.dimensions is not None and "dimensions" not in card.options:
        raise InvalidRequest("this model's vectors cannot be cut; leave dimensions out", field="dimensions")
    turn = turn_fields(body.priority, body.user, body.deadline, time.time())
    options = {} if body.dimensions is None else {"dimensions": body.dimensions}
    requests = [
        Request(
            request_id=f"embd-{uuid.uuid4().hex}",
            prompt=text if isinstance(text, str) else None,
            prompt_token_ids=None if isinstance(text, str) else text,
            add_special_tokens=body.add_special_tokens,
            modalities=["embedding"],
            options=options,
            **turn,
        )
        for text in _texts(body.input)
    ]
    return EmbeddingsRequest(body.model, requests, body.encoding_format == "base64")


def _texts(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One text, several, the ids of one, or the ids of several."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("input is empty; give at least one text", field="input")
    ids = [entry for entry in given if isinstance(entry, int)]
    if len(ids) == len(given):
        return [checked_token_ids(ids, "input")]
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(f"input has {len(given)} entries; there may be {MAX_INPUTS}", field="input")
    texts: list[str | list[int]] = []
    for index, entry in enumerate(given):
        if isinstance(entry, int) or type(entry) is not type(given[0]):
            raise InvalidRequest(
                f"input[{index}] is {shown(entry)}; all entries must be texts, or all lists of ids, or all ids",
                field=f"input[{index}]",
            )
        texts.append(checked_token_ids(entry, f"input[{index}]") if isinstance(entry, list) else entry)
    return texts


async def _answer(asked: EmbeddingsRequest, service: Service, metrics: ServerMetrics) -> dict[str, Any]:
    vectors, tokens = await pooled(asked.requests, EmbeddingDelta, "input", service, metrics)
    data = await asyncio.to_thread(_entries, [vector.data for vector in vectors], as_base64=asked.as_base64)
    return {
        "object": "list",
        "data": data,
        "model": asked.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _entries(vectors: Sequence[bytes], *, as_base64: bool) -> list[dict[str, Any]]:
    return [
        {
            "object": "embedding",
            "index": index,
            # little-endian float32, as numpy of the official client reads it
            "embedding": base64.b64encode(vector).decode() if as_base64 else EmbeddingDelta("", vector).array.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
