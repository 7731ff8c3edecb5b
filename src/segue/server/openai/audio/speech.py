"""`POST /v1/audio/speech`, in OpenAI's format: a text in, its speech out, sent as it is made."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response

from segue.media.encode import AUDIO_FORMATS, AudioEncoder, Samples, audio_encoder
from segue.media.speed import Reshaper
from segue.messages.deltas import AudioDelta, Finished
from segue.messages.errors import StageFailed
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.generation.generations import run_generations
from segue.server.http.body import read_json
from segue.server.http.checking import Checking
from segue.server.http.disconnect import ByteStream, EventStream
from segue.server.http.events import named_events
from segue.server.openai.audio.speech_request import WRITTEN, SpeechRequest, speech_request
from segue.server.settings import ServerSettings

_OWN = {"pcm": "pcm16"}
"""OpenAI's name of a format → its name in `AUDIO_FORMATS`, if they differ."""
_PCM_RATE = 24000
"""Samples per second of OpenAI's `pcm`, which has no header to state another."""


class _Encoding:
    """Samples to bytes of the file that the client asked for; a codec takes milliseconds: call it on a thread."""

    def __init__(self, asked: SpeechRequest, sample_rate: int) -> None:
        rate = _PCM_RATE if asked.response_format == "pcm" else None
        self._reshaper = Reshaper(sample_rate, speed=asked.speed, rate=rate)
        self._encoder: AudioEncoder = audio_encoder(_format(asked), self._reshaper.rate)

    def feed(self, samples: Samples) -> bytes:
        """The bytes that are ready."""
        return self._encoder.feed(self._reshaper.feed(samples))

    def finish(self) -> bytes:
        """The rest."""
        return self._encoder.feed(self._reshaper.finish()) + self._encoder.finish()


def _format(asked: SpeechRequest) -> str:
    return _OWN.get(asked.response_format, asked.response_format)


async def _made(
    asked: SpeechRequest, service: Service, metrics: ServerMetrics
) -> AsyncGenerator[tuple[bytes, Finished | None]]:
    """Yield the pieces of the file as they are made, none of them empty but perhaps the last, which has the end."""
    encoding: _Encoding | None = None
    async with aclosing(run_generations(service, [asked.request], metrics, WRITTEN)) as deltas:
        async for _, delta in deltas:
            if isinstance(delta, AudioDelta):
                if encoding is None:
                    encoding = await asyncio.to_thread(_Encoding, asked, delta.sample_rate)
                if piece := await asyncio.to_thread(encoding.feed, delta.array):
                    yield piece, None
            elif isinstance(delta, Finished):
                if encoding is None:
                    raise StageFailed("the model made no sound of this text")
                yield await asyncio.to_thread(encoding.finish), delta


async def speech_bytes(asked: SpeechRequest, service: Service, metrics: ServerMetrics) -> AsyncGenerator[bytes]:
    """The body with `stream_format` `audio`."""
    async with aclosing(_made(asked, service, metrics)) as pieces:
        async for piece, _ in pieces:
            if piece:
                yield piece


async def speech_events(
    asked: SpeechRequest, service: Service, metrics: ServerMetrics
) -> AsyncGenerator[dict[str, object]]:
    """The events with `stream_format` `sse`."""
    async with aclosing(_made(asked, service, metrics)) as pieces:
        async for piece, end in pieces:
            if piece:
                yield {"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()}
            if end is not None:
                yield {"type": "speech.audio.done", "usage": _usage(end)}


def _usage(end: Finished) -> dict[str, Any]:
    read, made = end.usage.prompt_tokens, end.usage.completion_tokens
    return {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}


def add_speech(
    app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics, checking: Checking
) -> None:
    """Add the endpoint."""

    @app.post("/v1/audio/speech")
    async def speak(request: HttpRequest) -> Response:
        values = await read_json(request, settings)
        asked = await checking.run(speech_request, values, service.card, settings)
        if asked.stream_format == "sse":
            return EventStream(named_events(speech_events(asked, service, metrics)), settings.stall_seconds)
        media_type = AUDIO_FORMATS[_format(asked)]
        return ByteStream(speech_bytes(asked, service, metrics), settings.stall_seconds, media_type)
