"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from segue.messages.errors import SegueError
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.accounts import usage_object
from segue.server.body import read_json
from segue.server.completion_reply import CompletionReader, joined
from segue.server.completion_request import CompletionRequest, completion_request
from segue.server.disconnect import EventStream, while_connected
from segue.server.errors import error_body, json_response
from segue.server.events import DONE, sse
from segue.server.generations import run_generations
from segue.server.settings import ServerSettings


def add_completions(app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics) -> None:
    """Add the endpoint."""

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        values = await read_json(request, settings.max_body_bytes)
        completion = completion_request(values, service.card, settings)
        if request.headers.get("x-return-metrics", "").lower() in ("1", "true"):
            completion = replace(completion, return_metrics=True)
        if completion.stream:
            return EventStream(_events(completion, service, metrics), settings.stall_seconds)
        return json_response(await while_connected(request.receive, _whole(completion, service, metrics)))


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
    async with aclosing(run_generations(service, completion.requests, metrics)) as deltas:
        async for number, delta in deltas:
            for entry in reader.read(number, delta):
                choices.setdefault(entry["index"], []).append(entry)
    return {
        **_head(completion),
        "choices": [joined(choices[index]) for index in sorted(choices)],
        "usage": usage_object(reader.finished, reader.prompts),
    }


async def _events(completion: CompletionRequest, service: Service, metrics: ServerMetrics) -> AsyncGenerator[bytes]:
    """Events up to `[DONE]`. An error before the first event is raised; after it, it is the last event."""
    reader = CompletionReader(completion)
    usage = {"usage": None} if completion.include_usage else {}
    begun = False
    async with aclosing(run_generations(service, completion.requests, metrics)) as deltas:
        try:
            async for number, delta in deltas:
                for entry in reader.read(number, delta):
                    begun = True
                    yield sse({**_head(completion), "choices": [entry], **usage})
        except SegueError as error:
            if not begun:
                raise
            yield sse(error_body(error))
            return
        if completion.include_usage:
            yield sse({**_head(completion), "choices": [], "usage": usage_object(reader.finished, reader.prompts)})
        yield DONE
