"""`POST /v1/audio/speech`, in OpenAI's format: a text in, its speech out, sent as it is made.

A text that is the body itself (`text/plain`) is said while it arrives: as it goes on, if the model takes text that is
appended to a running request, else sentence by sentence.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response

from segue.media.encode import AUDIO_FORMATS, AudioEncoder, Samples, audio_encoder
from segue.media.speed import Reshaper
from segue.messages.deltas import AudioDelta, Delta, Finished, Usage
from segue.messages.errors import StageFailed
from segue.messages.request import Request
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.orchestrator.spoken.passages import Passage, in_turn
from segue.server.generation.generations import run_generations
from segue.server.http.body import read_json
from segue.server.http.checking import Checking
from segue.server.http.disconnect import ByteStream, EventStream
from segue.server.http.events import named_events
from segue.server.openai.audio.arriving_text import ArrivingText, is_text, query_values
from segue.server.openai.audio.speech_request import WRITTEN, SpeechRequest, speech_options, speech_request
from segue.server.settings import ServerSettings

_OWN = {"pcm": "pcm16"}
"""OpenAI's name of a format → its name in `AUDIO_FORMATS`, if they differ."""
PCM_RATE = 24000
"""Samples per second of OpenAI's `pcm`, which has no header to state another."""


class _Encoding:
    """Samples to bytes of the file that the client asked for; a codec takes milliseconds: call it on a thread."""

    def __init__(self, asked: SpeechRequest, sample_rate: int) -> None:
        rate = PCM_RATE if asked.response_format == "pcm" else None
        self._new_reshaper = partial(Reshaper, sample_rate, speed=asked.speed, rate=rate)
        self._reshaper = self._new_reshaper()
        self._encoder: AudioEncoder = audio_encoder(_format(asked), self._reshaper.rate)

    def feed(self, samples: Samples) -> bytes:
        """The bytes that are ready."""
        return self._encoder.feed(self._reshaper.feed(samples))

    def end_text(self) -> bytes:
        """The bytes that are ready at the end of a text; the samples of another may follow."""
        rest = self._reshaper.finish()
        self._reshaper = self._new_reshaper()
        return self._encoder.feed(rest)

    def finish(self) -> bytes:
        """The rest of the file."""
        return self._encoder.finish()


def _format(asked: SpeechRequest) -> str:
    return _OWN.get(asked.response_format, asked.response_format)


async def encoded(asked: SpeechRequest, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[tuple[bytes, list[Usage]]]:
    """Yield the pieces of the file as they are made, none of them empty but perhaps the last, which has the usages.

    `deltas`: of one text or several, each with its `Finished`. Raises `StageFailed` for a text without audio.
    """
    encoding: _Encoding | None = None
    usages: list[Usage] = []
    audible = False
    async with aclosing(deltas):
        async for delta in deltas:
            if isinstance(delta, AudioDelta):
                audible = True
                if encoding is None:
                    encoding = await asyncio.to_thread(_Encoding, asked, delta.sample_rate)
                if piece := await asyncio.to_thread(encoding.feed, delta.array):
                    yield piece, []
            elif isinstance(delta, Finished):
                if encoding is None or not audible:
                    raise StageFailed("the model returned no audio for this text")
                audible = False
                usages.append(delta.usage)
                if piece := await asyncio.to_thread(encoding.end_text):
                    yield piece, []
    if encoding is None:
        raise StageFailed("the model returned no audio")
    yield await asyncio.to_thread(encoding.finish), usages


async def speech_bytes(asked: SpeechRequest, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[bytes]:
    """The body with `stream_format` `audio`."""
    async with aclosing(encoded(asked, deltas)) as pieces:
        async for piece, _ in pieces:
            if piece:
                yield piece


async def speech_events(asked: SpeechRequest, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[dict[str, object]]:
    """The events with `stream_format` `sse`."""
    async with aclosing(encoded(asked, deltas)) as pieces:
        async for piece, usages in pieces:
            if piece:
                yield {"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()}
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
    asked: SpeechRequest, passage: Passage, service: Service, metrics: ServerMetrics, *, goes_on: bool
) -> AsyncGenerator[Delta]:
    """The deltas of one passage. `goes_on`: it is begun with its first piece; else it has arrived."""
    async with aclosing(passage.pieces()) as pieces:
        first = await anext(pieces) if goes_on else "".join([piece async for piece in pieces])
        deltas = said(asked.of_text(first), service, metrics, pieces if goes_on else None)
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

            def say(passage: Passage) -> AsyncGenerator[Delta]:
                return passage_said(asked, passage, service, metrics, goes_on=goes_on)

            return text.while_read(answer(asked, in_turn(text.passages(), say)))
        values = await read_json(request, settings, "application/json or text/plain")
        asked = await checking.run(speech_request, values, service.card, settings)
        return answer(asked, said(asked.request, service, metrics))

    def answer(asked: SpeechRequest, deltas: AsyncGenerator[Delta]) -> ByteStream:
        if asked.stream_format == "sse":
            return EventStream(named_events(speech_events(asked, deltas)), settings.stall_seconds)
        media_type = AUDIO_FORMATS[_format(asked)]
        return ByteStream(speech_bytes(asked, deltas), settings.stall_seconds, media_type)
