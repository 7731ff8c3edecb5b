"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API over chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from segue.messages.deltas import Delta
from segue.messages.errors import SegueError
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.anthropic.request import MessagesRequest, count_request, messages_request
from segue.server.anthropic.writer import MessageWriter
from segue.server.generation.generations import run_generations
from segue.server.http.body import read_json
from segue.server.http.checking import Checking
from segue.server.http.disconnect import EventStream, while_connected
from segue.server.http.errors import MESSAGES, error_body, json_response
from segue.server.http.events import events
from segue.server.settings import ServerSettings
from segue.server.vllm.tokenize import count_prompt


def add_messages(
    app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics, checking: Checking
) -> None:
    """Add the endpoints."""

    @app.post(MESSAGES)
    async def create(http: Request) -> Response:
        values = await read_json(http, settings)
        asked = await checking.run(messages_request, values, service.card, settings)
        deltas = run_generations(service, asked.chat.requests, metrics, asked.chat.written)
        if asked.stream:
            return EventStream(events(_events(asked, deltas), named=True), settings.stall_seconds)
        return json_response(await while_connected(http.receive, _whole(asked, deltas)))

    @app.post(f"{MESSAGES}/count_tokens")
    async def count(http: Request) -> Response:
        values = await read_json(http, settings)
        asked = await checking.run(count_request, values, service.card, settings)
        return json_response({"input_tokens": await count_prompt(http, service, asked.chat)})


async def _whole(asked: MessagesRequest, deltas: AsyncGenerator[tuple[int, Delta]]) -> dict[str, Any]:
    writer = MessageWriter(asked)
    async with aclosing(deltas):
        async for _, delta in deltas:
            writer.take(delta)
    return writer.message


async def _events(
    asked: MessagesRequest, deltas: AsyncGenerator[tuple[int, Delta]]
) -> AsyncGenerator[dict[str, object]]:
    """Stream events. Nothing is sent before the first delta, so that an earlier refusal has its own HTTP status."""
    writer = MessageWriter(asked)
    begun = False
    async with aclosing(deltas):
        try:
            async for _, delta in deltas:
                for event in [] if begun else writer.begin(delta):
                    yield event
                begun = True
                for event in writer.take(delta):
                    yield event
        except SegueError as error:
            if not begun:
                raise
            yield error_body(error, MESSAGES)
