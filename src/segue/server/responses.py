"""/v1/responses: OpenAI's Responses API over chat, with what is kept, what is made in the background, and how many
tokens an input is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from segue.messages.deltas import Delta, Finished
from segue.messages.errors import SegueError
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.body import read_json
from segue.server.checking import Checking
from segue.server.disconnect import EventStream, while_connected
from segue.server.errors import json_response
from segue.server.events import named_events
from segue.server.generations import run_generations
from segue.server.paging import page_of
from segue.server.response_background import BackgroundResponses
from segue.server.response_queries import events_after, listed_items
from segue.server.response_request import ResponsesRequest, responses_request
from segue.server.response_store import ResponseStore, Turn, items_so_far
from segue.server.response_writer import ResponseWriter
from segue.server.settings import ServerSettings
from segue.server.tokenize import count_prompt


class Responses:
    """The responses that a server keeps, for as long as it runs."""

    def __init__(self, service: Service, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self.store = ResponseStore(settings.max_responses, settings.max_response_bytes)
        self.background = BackgroundResponses(service, self.store, metrics)


def add_responses(
    app: FastAPI,
    service: Service,
    settings: ServerSettings,
    metrics: ServerMetrics,
    checking: Checking,
    responses: Responses,
) -> None:
    """Add the endpoints."""
    store, background = responses.store, responses.background

    async def asked_in(request: Request) -> tuple[ResponsesRequest, Turn | None]:
        """The checked request, and what it goes on from."""
        values = await read_json(request, settings)
        previous = values.get("previous_response_id")
        before = store.turn(previous) if isinstance(previous, str) else None

        def checked() -> ResponsesRequest:
            return responses_request(values, items_so_far(before), service.card, settings)

        return await checking.run(checked), before

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        asked, before = await asked_in(request)
        if asked.background:
            queued, journal = background.submit(asked, before)
            return EventStream(journal.after(-1), settings.stall_seconds) if asked.stream else json_response(queued)
        deltas = run_generations(service, asked.chat.requests, metrics, asked.chat.written)
        if asked.stream:
            return EventStream(named_events(_events(asked, deltas, store, before)), settings.stall_seconds)
        return json_response(await while_connected(request.receive, _whole(asked, deltas, store, before)))

    @app.post("/v1/responses/input_tokens")
    async def count(request: Request) -> Response:
        asked, _ = await asked_in(request)
        tokens = await count_prompt(request, service, asked.chat)
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    @app.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str, request: Request) -> Response:
        kept = store.response(response_id)
        if (after := events_after(request.query_params)) is not None:
            return EventStream(store.journal(response_id).after(after), settings.stall_seconds)
        return Response(kept, media_type="application/json")

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, request: Request) -> Response:
        before, inputs = store.inputs(response_id)
        page = page_of(request.query_params)
        return json_response(await asyncio.to_thread(listed_items, response_id, before, inputs, page))

    @app.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> Response:
        await background.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        return Response(await background.cancel(response_id), media_type="application/json")


async def _whole(
    asked: ResponsesRequest,
    deltas: AsyncGenerator[tuple[int, Delta]],
    store: ResponseStore,
    before: Turn | None,
) -> dict[str, Any]:
    writer = ResponseWriter(asked)
    async with aclosing(deltas):
        async for _, delta in deltas:
            writer.take(delta)
    _keep(asked, writer, store, before)
    return writer.response


async def _events(
    asked: ResponsesRequest,
    deltas: AsyncGenerator[tuple[int, Delta]],
    store: ResponseStore,
    before: Turn | None,
) -> AsyncGenerator[dict[str, object]]:
    """Nothing is said before there is a delta, so that what is refused until then has a status of its own."""
    writer = ResponseWriter(asked)
    begun = False
    async with aclosing(deltas):
        try:
            async for _, delta in deltas:
                if not begun:
                    begun = True
                    for event in writer.begin():
                        yield event
                events = writer.take(delta)
                if isinstance(delta, Finished):  # before the client hears of the end, and may go on from it
                    _keep(asked, writer, store, before)
                for event in events:
                    yield event
        except SegueError as error:
            if not begun:
                raise
            for event in writer.fail(error):
                yield event


def _keep(asked: ResponsesRequest, writer: ResponseWriter, store: ResponseStore, before: Turn | None) -> None:
    if asked.store:
        store.keep(writer.response, asked.items, before)
