"""`POST /v1/audio/speech`, in OpenAI's format: a text in, its speech out, sent as it is made.

A text that is the body itself (`text/plain`) is said while it arrives: as it goes on, if the model takes text that is
appended to a running request, else sentence by sentence.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response

from segue.messages.deltas import Delta, EncodedDelta, Finished, Usage
from segue.messages.errors import StageFailed
from segue.messages.formats import AUDIO_FORMATS
from segue.messages.request import Request
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.orchestrator.spoken.passages import Passage, in_turn
from segue.server.generation.generations import run_generations
from segue.server.http.body import read_json
from segue.server.http.checking import Checking
from segue.server.http.disconnect import ByteStream, EventStream
from segue.server.http.events import events
from segue.server.openai.audio.arriving_text import ArrivingText, is_text, query_values
from segue.server.openai.audio.speech_request import WRITTEN, SpeechRequest, speech_options, speech_request
from segue.server.settings import ServerSettings


async def encoded(deltas: AsyncGenerator[Delta]) -> AsyncGenerator[tuple[bytes, list[Usage]]]:
    """Yield the pieces of the file as they are made, none of them empty but the last, which has the usages.

    `deltas`, whose bytes may be base64: of one text or several, each with its `Finished`. Raises `StageFailed` for a
    text without audio.
    """
    usages: list[Usage] = []
    audible = False
    async with aclosing(deltas):
        async for delta in deltas:
            if isinstance(delta, EncodedDelta):
                audible = True
                if delta.data:
                    yield delta.data, []
            elif isinstance(delta, Finished):
                if not audible:
                    raise StageFailed("the model returned no audio for this text")
                audible = False
                usages.append(delta.usage)
    if not usages:
        raise StageFailed("the model returned no audio")
    yield b"", usages


async def speech_bytes(deltas: AsyncGenerator[Delta]) -> AsyncGenerator[bytes]:
    """The body with `stream_format` `audio`."""
    async with aclosing(encoded(deltas)) as pieces:
        async for piece, _ in pieces:
            if piece:
                yield piece


async def speech_events(deltas: AsyncGenerator[Delta]) -> AsyncGenerator[dict[str, object]]:
    """The events with `stream_format` `sse`."""
    async with aclosing(encoded(deltas)) as pieces:
        async for piece, usages in pieces:
            if piece:
                yield {"type": "speech.audio.delta", "audio": piece.decode()}
            if usages:
                yield {"type": "speech.audio.done", "usage": _total(usages)}


def _total(usages: list[Usage]) -> dict[str, Any]:
    read = sum(usage.prompt_tokens for usage in usages)
    made = sum(usage.completion_tokens for usage in usages)
    return {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}


async def said(
    request: Request, service: Service, metrics: ServerMetrics, pieces: AsyncGenerator[str] | None = None
) -> AsyncGenerator[Delta]:
    """The deltas of one text. `pieces`: appended to it as they come."""

    def stream(request: Request) -> AsyncGenerator[Delta]:
        return service.stream(request) if pieces is None else service.stream_appended(request, pieces)

    async with aclosing(run_generations(service, [request], metrics, WRITTEN, stream=stream)) as deltas:
        async for _, delta in deltas:
            yield delta


async def passage_said(
    asked: SpeechRequest, passage: Passage, part: int, service: Service, metrics: ServerMetrics, *, goes_on: bool
) -> AsyncGenerator[Delta]:
    """The deltas of one passage, which is part `part` of the file. `goes_on`: it is begun with its first piece; else it
    has arrived."""
    async with aclosing(passage.pieces()) as pieces:
        first = await anext(pieces) if goes_on else "".join([piece async for piece in pieces])
        deltas = said(asked.of_text(first, part), service, metrics, pieces if goes_on else None)
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta


def add_speech(
    app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics, checking: Checking
) -> None:
    """Add the endpoint."""

    @app.post("/v1/audio/speech")
    async def speak(request: HttpRequest) -> Response:
        if is_text(request):
            says = service.card.says
            goes_on = says is not None and says.appends
            text = ArrivingText(request, settings, goes_on=goes_on)
            asked = await checking.run(speech_options, query_values(request), service.card, settings)

            parts = itertools.count()

            def say(passage: Passage) -> AsyncGenerator[Delta]:
                return passage_said(asked, passage, next(parts), service, metrics, goes_on=goes_on)

            return text.while_read(answer(asked, in_turn(text.passages(), say)))
        values = await read_json(request, settings, "application/json or text/plain")
        asked = await checking.run(speech_request, values, service.card, settings)
        return answer(asked, said(asked.request, service, metrics))

    def answer(asked: SpeechRequest, deltas: AsyncGenerator[Delta]) -> ByteStream:
        if asked.stream_format == "sse":
            return EventStream(events(speech_events(deltas), named=True), settings.stall_seconds)
        media_type = AUDIO_FORMATS[asked.request.formats["audio"].name]
        return ByteStream(speech_bytes(deltas), settings.stall_seconds, media_type)
