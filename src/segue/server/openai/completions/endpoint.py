"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from segue.messages.deltas import Delta
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.generation.generations import run_generations
from segue.server.generation.usage import RunningUsage, usage_object
from segue.server.http.body import read_json
from segue.server.http.disconnect import EventStream, while_connected
from segue.server.http.errors import json_response
from segue.server.http.events import events
from segue.server.openai.completions.reply import CompletionReader, joined
from segue.server.openai.completions.request import CompletionRequest, completion_request
from segue.server.settings import ServerSettings
from segue.server.vllm.parameters import NOTHING_OF_ANSWER, with_headers


def add_completions(app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics) -> None:
    """Add the endpoint."""

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        values = with_headers(await read_json(request, settings), request)
        completion = await asyncio.to_thread(completion_request, values, service.card, settings)
        if completion.stream:
            return EventStream(events(_chunks(completion, service, metrics)), settings.stall_seconds)
        return json_response(await while_connected(request.receive, _whole(completion, service, metrics)))


def _run(completion: CompletionRequest, service: Service, metrics: ServerMetrics) -> AsyncGenerator[tuple[int, Delta]]:
    return run_generations(service, completion.requests, metrics, completion.written, completion.named)


def _head(completion: CompletionRequest) -> dict[str, Any]:
    return {
        "id": completion.completion_id,
        "object": "text_completion",
        "created": completion.created,
        "model": completion.model,
    }


async def _whole(completion: CompletionRequest, service: Service, metrics: ServerMetrics) -> dict[str, Any]:
    reader = CompletionReader(completion)
    choices: dict[int, list[dict[str, Any]]] = {}
    async with aclosing(_run(completion, service, metrics)) as deltas:
        async for number, delta in deltas:
            for entry in reader.read(number, delta):
                choices.setdefault(entry["index"], []).append(entry)
    return {
        **NOTHING_OF_ANSWER,
        **_head(completion),
        "choices": [joined(choices[index]) for index in sorted(choices)],
        "usage": usage_object(reader.finished, reader.prompts),
    }


async def _chunks(
    completion: CompletionRequest, service: Service, metrics: ServerMetrics
) -> AsyncGenerator[dict[str, object]]:
    reader = CompletionReader(completion)
    running = RunningUsage(completion)
    async with aclosing(_run(completion, service, metrics)) as deltas:
        async for number, delta in deltas:
            running.take_prompt(delta)
            running.take(delta)
            for entry in reader.read(number, delta):
                yield {**_head(completion), "choices": [entry], **running.fields()}
    if completion.include_usage:
        yield {**_head(completion), "choices": [], "usage": usage_object(reader.finished, reader.prompts)}
