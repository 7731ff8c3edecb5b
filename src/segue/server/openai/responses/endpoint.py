"""`/v1/responses`: OpenAI's Responses API over chat completions.

Makes responses whole, streamed or in the background, returns stored ones with their events and input items, and counts
the tokens of an input.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from segue.messages.deltas import Delta, Finished
from segue.messages.errors import InvalidRequest, SegueError, wrong
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.generation.generations import run_generations
from segue.server.http.body import read_json
from segue.server.http.checking import Checking
from segue.server.http.disconnect import EventStream, while_connected
from segue.server.http.errors import json_response
from segue.server.http.events import events
from segue.server.http.paging import Page, listed, page_of
from segue.server.openai.responses.background import BackgroundResponses
from segue.server.openai.responses.request import ResponsesRequest, responses_request
from segue.server.openai.responses.store import ResponseStore, Turn, items_so_far
from segue.server.openai.responses.writer import ResponseWriter
from segue.server.settings import ServerSettings
from segue.server.tenants.tenants import caller
from segue.server.vllm.tokenize import count_prompt

_DIGITS = 15
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def events_after(query: Mapping[str, str]) -> int | None:
    """The sequence number after which a client wants events, from the query of a URL; None if it wants the response
    itself. Raises `InvalidRequest`."""
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream not in ("true", "false"):
        raise wrong("stream", stream, "true or false")
    if after is not None and not (after.isascii() and after.isdecimal() and len(after) <= _DIGITS):
        raise wrong("starting_after", after, "the sequence number of an event")
    if stream == "false":
        if after is not None:
            raise InvalidRequest("starting_after is given, but stream is not true", field="starting_after")
        return None
    return -1 if after is None else int(after)


def listed_items(response_id: str, before: Turn | None, inputs: bytes, page: Page) -> dict[str, Any]:
    """A page of a response's input items: the conversation `before` it, and its own input."""
    items = [*items_so_far(before), *msgspec.json.decode(inputs)]
    own = response_id.removeprefix("resp_")
    return listed([_as_item(item, f"{own}_{index}") for index, item in enumerate(items)], page, "item")


def _as_item(item: dict[str, Any], place: str) -> dict[str, Any]:
    """Add the keys that a client may omit: type, id, and parts instead of a bare text."""
    kind = item.get("type", "message")
    whole = {"id": f"{_PREFIXES[kind]}_{place}", "type": kind, "status": "completed"} | {
        name: value for name, value in item.items() if value is not None
    }
    content = whole.get("content")
    if kind == "message" and isinstance(content, str):
        said = item["role"] == "assistant"
        part = {"type": "output_text", "annotations": []} if said else {"type": "input_text"}
        whole["content"] = [{**part, "text": content}]
    return whole


class Responses:
    """The stored and background responses of a running server."""

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
        """The checked request, and the turn that it continues."""
        values = await read_json(request, settings)
        previous = values.get("previous_response_id")
        before = None
        if isinstance(previous, str):
            store.check_owner(previous, caller(), "previous_response_id")
            before = store.turn(previous)

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
            return EventStream(events(_events(asked, deltas, store, before), named=True), settings.stall_seconds)
        return json_response(await while_connected(request.receive, _whole(asked, deltas, store, before)))

    @app.post("/v1/responses/input_tokens")
    async def count(request: Request) -> Response:
        asked, _ = await asked_in(request)
        tokens = await count_prompt(request, service, asked.chat)
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    @app.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str, request: Request) -> Response:
        store.check_owner(response_id, caller())
        kept = store.response(response_id)
        if (after := events_after(request.query_params)) is not None:
            return EventStream(store.journal(response_id).after(after), settings.stall_seconds)
        return Response(kept, media_type="application/json")

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, request: Request) -> Response:
        store.check_owner(response_id, caller())
        before, inputs = store.inputs(response_id)
        page = page_of(request.query_params)
        return json_response(await asyncio.to_thread(listed_items, response_id, before, inputs, page))

    @app.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> Response:
        store.check_owner(response_id, caller())
        await background.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        store.check_owner(response_id, caller())
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
    """Stream events. Nothing is sent before the first delta, so that an earlier refusal has its own HTTP status."""
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
                if isinstance(delta, Finished):  # store it before the client sees the end and may continue it
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
        store.keep(writer.response, asked.items, before, caller())
