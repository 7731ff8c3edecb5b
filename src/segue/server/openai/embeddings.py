"""`POST /v1/embeddings`, as in OpenAI's API: texts or token ids in, vectors out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response

from segue.messages.deltas import EmbeddingDelta
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import ModelCard, Service
from segue.server.generation.parameters import check_model, parse_body, with_model
from segue.server.generation.text_requests import TextsBody, pooled, text_requests, written_as_base64, written_numbers
from segue.server.http.body import read_json
from segue.server.http.disconnect import while_connected
from segue.server.http.errors import json_response, not_for_this_model
from segue.server.settings import ServerSettings
from segue.server.vllm.parameters import OF_TEXTS


class EmbeddingsBody(TextsBody, kw_only=True):
    """Every parameter that has an effect. null means not given."""

    encoding_format: str | None = None
    dimensions: int | None = None


_UNSUPPORTED: dict[str, tuple[object, ...]] = {**OF_TEXTS, "use_activation": (True,), "cache_salt": ()}


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
        asked = await asyncio.to_thread(embeddings_request, values, service.card, settings)
        return json_response(await while_connected(request.receive, _answer(asked, service, metrics)))


def embeddings_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> EmbeddingsRequest:
    """Check the body. Raises `InvalidRequest` with parameter, value and remedy."""
    body = parse_body(with_model(values, card, settings), EmbeddingsBody, _UNSUPPORTED, {})
    check_model(body.model, card, settings)
    if "embedding" not in card.gives:
        raise not_for_this_model("gives no embeddings")
    as_base64 = written_as_base64(body.encoding_format)
    requests = text_requests(body, "embd", "embedding", vector_options(body.dimensions, card), card)
    return EmbeddingsRequest(body.model, requests, as_base64)


def vector_options(dimensions: int | None, card: ModelCard) -> dict[str, Any]:
    """Options of a request for a vector. Raises `InvalidRequest` if the model does not support `dimensions`."""
    if dimensions is None:
        return {}
    if "dimensions" not in card.options:
        raise InvalidRequest("this model's vectors cannot be truncated; leave dimensions out", field="dimensions")
    return {"dimensions": dimensions}


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
        {"object": "embedding", "index": index, "embedding": written_numbers(vector, as_base64=as_base64)}
        for index, vector in enumerate(vectors)
    ]
