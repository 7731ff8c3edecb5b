"""POST /v1/audio/transcriptions and /v1/audio/translations, as OpenAI has them: a recording in, its text out."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.disconnect import EventStream, while_connected
from segue.server.errors import json_response
from segue.server.events import named_events
from segue.server.multipart import read_values
from segue.server.settings import ServerSettings
from segue.server.transcription_reply import heard, json_object, plain_text, transcript_events
from segue.server.transcription_request import (
    FILES,
    TranscriptionBody,
    TranslationBody,
    transcription_request,
)


def add_transcriptions(app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics) -> None:
    """Add the endpoints."""

    @app.post("/v1/audio/transcriptions")
    async def transcribe(request: HttpRequest) -> Response:
        return await answer(request, TranscriptionBody, "transcribe")

    @app.post("/v1/audio/translations")
    async def translate(request: HttpRequest) -> Response:
        return await answer(request, TranslationBody, "translate")

    async def answer(request: HttpRequest, kind: type[TranslationBody], task: str) -> Response:
        values = await read_values(request, settings, kind, FILES)
        asked = transcription_request(values, task, service.card, settings)
        if asked.stream:
            return EventStream(named_events(transcript_events(asked, service, metrics)), settings.stall_seconds)
        whole = await while_connected(request.receive, heard(asked, service, metrics))
        if asked.response_format in ("json", "verbose_json"):
            return json_response(json_object(whole, asked))
        return PlainTextResponse(plain_text(whole, asked.response_format))
