"""`POST /v1/images/generations` and `/v1/images/edits`, as in OpenAI's API."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from segue.messages.errors import InvalidRequest
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.http.body import read_json
from segue.server.http.checking import Checking
from segue.server.http.disconnect import EventStream, while_connected
from segue.server.http.errors import json_response
from segue.server.http.events import events
from segue.server.http.multipart import read_values
from segue.server.openai.images.names import OF_EDITS, OF_GENERATIONS
from segue.server.openai.images.reply import image_events, whole_images
from segue.server.openai.images.request import (
    EDIT_FILES,
    UNSUPPORTED,
    UNSUPPORTED_OF_EDITS,
    EditBody,
    ImageBody,
    ImageRequest,
    edited_images,
    image_request,
    painting_body,
    with_one_name,
)
from segue.server.settings import ServerSettings


def add_images(
    app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics, checking: Checking
) -> None:
    """Add the endpoints."""

    @app.post("/v1/images/generations")
    async def generate(request: Request) -> Response:
        values = await read_json(request, settings)
        body = painting_body(values, ImageBody, UNSUPPORTED, OF_GENERATIONS)
        asked = image_request(body, service.card, settings, event="image_generation", images=[])
        return await _answer(asked, request, service, settings, metrics)

    @app.post("/v1/images/edits")
    async def edit(request: Request) -> Response:
        values = with_one_name(await read_values(request, settings, EditBody, EDIT_FILES))
        if values.get("mask") is not None and values.get("image") is None:
            raise InvalidRequest("mask is given without image; mask marks the part of image to repaint", field="mask")
        body = painting_body(values, EditBody, UNSUPPORTED_OF_EDITS, OF_EDITS)
        images = await checking.run(edited_images, body, service.card, settings)
        asked = image_request(body, service.card, settings, event="image_edit", images=images)
        return await _answer(asked, request, service, settings, metrics)


async def _answer(
    asked: ImageRequest, request: Request, service: Service, settings: ServerSettings, metrics: ServerMetrics
) -> Response:
    if asked.stream:
        return EventStream(events(image_events(asked, service, metrics), named=True), settings.stall_seconds)
    return json_response(await while_connected(request.receive, whole_images(asked, service, metrics)))
