"""`POST /classify` and `/pooling` (and `/v1/classify`, `/v1/pooling`), as in vLLM: classes of texts, or a model's raw
output for them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response

from segue.messages.deltas import ClassesDelta, EmbeddingDelta
from segue.messages.errors import InvalidRequest, nearest, shown
from segue.messages.request import Request
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import ModelCard, Service
from segue.server.generation.parameters import check_model, new_id, parse_body, with_model
from segue.server.generation.text_requests import TextsBody, pooled, text_requests, written_as_base64, written_numbers
from segue.server.http.body import read_json
from segue.server.http.disconnect import while_connected
from segue.server.http.errors import Unsupported, json_response
from segue.server.openai.embeddings import vector_options
from segue.server.settings import ServerSettings
from segue.server.vllm.parameters import OF_TEXTS, checked_id

_TASKS = {"embed": "embedding", "classify": "classes"}
"""vLLM's tasks → the model's outputs for them."""
_OTHER_TASKS = ("token_embed", "token_classify", "plugin")


class ClassifyBody(TextsBody, kw_only=True):
    """Every parameter that has an effect. null means not given."""

    use_activation: bool | None = None
    """False returns raw logits."""
    request_id: str | None = None


class PoolingBody(ClassifyBody, kw_only=True):
    """Every parameter that has an effect. null means not given."""

    task: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None


def add_pooling(app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics) -> None:
    """Add the endpoints."""

    @app.post("/v1/classify")
    @app.post("/classify")
    async def classify(http: HttpRequest) -> Response:
        values = await read_json(http, settings)
        body, requests = await asyncio.to_thread(classify_request, values, service.card, settings)
        found, tokens = await while_connected(http.receive, pooled(requests, ClassesDelta, "input", service, metrics))
        data = [
            {"index": index, "label": one.label, "probs": one.array.tolist(), "num_classes": len(one.array)}
            for index, one in enumerate(found)
        ]
        return json_response(_answer("classify", body, data, tokens))

    @app.post("/v1/pooling")
    @app.post("/pooling")
    async def pool(http: HttpRequest) -> Response:
        values = await read_json(http, settings)
        body, requests, as_base64 = await asyncio.to_thread(pooling_request, values, service.card, settings)
        classes = requests[0].modalities == ["classes"]
        found, tokens = await while_connected(http.receive, _pooled(requests, classes, service, metrics))
        data = await asyncio.to_thread(_entries, found, as_base64=as_base64)
        return json_response(_answer("pool", body, data, tokens))


async def _pooled(
    requests: list[Request], classes: bool, service: Service, metrics: ServerMetrics
) -> tuple[list[bytes], int]:
    """(float32 output of each text, prompt tokens of all)."""
    if classes:
        sorted_in, tokens = await pooled(requests, ClassesDelta, "input", service, metrics)
        return [one.data for one in sorted_in], tokens
    vectors, tokens = await pooled(requests, EmbeddingDelta, "input", service, metrics)
    return [one.data for one in vectors], tokens


def _entries(found: list[bytes], *, as_base64: bool) -> list[dict[str, Any]]:
    return [
        {"index": index, "object": "pooling", "data": written_numbers(data, as_base64=as_base64)}
        for index, data in enumerate(found)
    ]


def _answer(prefix: str, body: ClassifyBody, data: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    return {
        "id": new_id(prefix) if body.request_id is None else f"{prefix}-{body.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": data,
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
    }


def classify_request(
    values: dict[str, Any], card: ModelCard, settings: ServerSettings
) -> tuple[ClassifyBody, list[Request]]:
    """Check the body. Raises `InvalidRequest` with parameter, value and remedy."""
    body = parse_body(with_model(values, card, settings), ClassifyBody, OF_TEXTS, {})
    check_model(body.model, card, settings)
    checked_id(body.request_id)
    _check_gives("classify", body.model, card, "model")
    return body, text_requests(body, "classify", "classes", _activation(body), card)


def pooling_request(
    values: dict[str, Any], card: ModelCard, settings: ServerSettings
) -> tuple[PoolingBody, list[Request], bool]:
    """(body, a request per text, whether the answer is in base64). Raises `InvalidRequest` with parameter, value and
    remedy."""
    body = parse_body(with_model(values, card, settings), PoolingBody, OF_TEXTS, {})
    check_model(body.model, card, settings)
    checked_id(body.request_id)
    task = body.task or next((task for task, gives in _TASKS.items() if gives in card.gives), "embed")
    if task not in _TASKS:
        known = (*_TASKS, *_OTHER_TASKS)
        wrong = Unsupported if task in known else InvalidRequest
        hint = "; this server supports embed and classify" if task in known else nearest(task, _TASKS)
        raise wrong(f"task is {shown(task)}{hint}", field="task")
    _check_gives(task, body.model, card, "model" if body.task is None else "task")
    as_base64 = written_as_base64(body.encoding_format)
    if task == "classify":
        if body.dimensions is not None:
            raise InvalidRequest(
                f"dimensions is {body.dimensions}; classes cannot be truncated: leave it out", field="dimensions"
            )
        return body, text_requests(body, "pool", "classes", _activation(body), card), as_base64
    if body.use_activation is False:
        raise Unsupported(
            "use_activation is False; vectors are returned as the checkpoint makes them: leave it out",
            field="use_activation",
        )
    return body, text_requests(body, "pool", "embedding", vector_options(body.dimensions, card), card), as_base64


def _check_gives(task: str, model: str, card: ModelCard, field: str) -> None:
    if _TASKS[task] not in card.gives:
        what = "embeddings" if task == "embed" else "classes"
        raise Unsupported(
            f"model {shown(model)} gives no {what} (it gives {', '.join(sorted(card.gives))})", field=field
        )


def _activation(body: ClassifyBody) -> dict[str, Any]:
    return {} if body.use_activation is None else {"use_activation": body.use_activation}
