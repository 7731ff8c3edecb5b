"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`, in OpenAI's formats: a recording in, its text out."""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from segue.messages.deltas import Finished, SegmentDelta, TextDelta
from segue.messages.errors import StageFailed
from segue.models.shared.dialects.pieces import ReplyPiece, Said
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.generation.generations import run_generations
from segue.server.http.disconnect import EventStream, while_connected
from segue.server.http.errors import json_response
from segue.server.http.events import events
from segue.server.http.multipart import read_values
from segue.server.openai.audio.request import (
    FILES,
    TranscriptionBody,
    TranscriptionRequest,
    TranslationBody,
    transcription_request,
)
from segue.server.settings import ServerSettings


class _Words:
    """The transcript in the text of a model: without its thoughts."""

    def __init__(self, asked: TranscriptionRequest) -> None:
        opened = asked.dialect.begins_in_thought({})
        self._parser = asked.dialect.parser(opened=opened, tools=None)

    def feed(self, text: str) -> str:
        """The new words that are certain."""
        return _said(self._parser.feed(text))

    def finish(self) -> str:
        """The words held back."""
        return _said(self._parser.finish())


def _said(pieces: list[ReplyPiece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Said))


@dataclass(slots=True)
class Transcript:
    """A complete transcript."""

    finished: Finished
    text: str
    segments: list[SegmentDelta] = field(default_factory=list)


async def transcript(asked: TranscriptionRequest, service: Service, metrics: ServerMetrics) -> Transcript:
    """Collect the transcript. Raises `SegueError`."""
    pieces: list[str] = []
    words = _Words(asked)
    segments: list[SegmentDelta] = []
    async with aclosing(run_generations(service, [asked.request], metrics, asked.written)) as deltas:
        async for _, delta in deltas:
            if isinstance(delta, TextDelta):
                pieces.append(words.feed(delta.text))
            elif isinstance(delta, SegmentDelta):
                segments.append(delta)
            elif isinstance(delta, Finished):
                return Transcript(delta, "".join([*pieces, words.finish()]).strip(), segments)
    raise StageFailed("a generation ended without saying how")


def json_object(whole: Transcript, asked: TranscriptionRequest) -> dict[str, Any]:
    """The answer in the formats `json` and `verbose_json`."""
    usage = _usage(whole.finished, asked)
    if asked.response_format == "json":
        return {"text": whole.text, "usage": usage}
    return {
        "task": asked.task,
        # language of the text, which is English if the recording was translated
        "language": "en" if asked.task == "translate" else whole.finished.language,
        "duration": whole.finished.audio_seconds,
        "text": whole.text,
        "segments": [_segment(number, one, asked) for number, one in enumerate(whole.segments)],
        "usage": usage,
    }


def _segment(number: int, segment: SegmentDelta, asked: TranscriptionRequest) -> dict[str, Any]:
    data = segment.text.encode()
    return {
        "id": number,
        "seek": segment.seek,
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": segment.token_ids,
        "temperature": asked.temperature,
        "avg_logprob": segment.logprob,
        "compression_ratio": len(data) / len(zlib.compress(data)),
    }


def plain_text(whole: Transcript, form: str) -> str:
    """The answer in the formats `text`, `srt` (SubRip) and `vtt` (WebVTT)."""
    if form == "text":
        return f"{whole.text}\n"
    spoken = [one for one in whole.segments if one.text.strip()]
    if form == "vtt":
        return "WEBVTT\n\n" + "".join(_cue(one, ".") for one in spoken)
    return "".join(f"{number}\n{_cue(one, ',')}" for number, one in enumerate(spoken, start=1))


def _cue(segment: SegmentDelta, point: str) -> str:
    text = segment.text.strip().replace("-->", "->")  # players would read --> as times
    text = "\n".join(line for line in text.splitlines() if line.strip())  # an empty line ends a cue
    return f"{_clock(segment.start, point)} --> {_clock(segment.end, point)}\n{text}\n\n"


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


async def transcript_events(
    asked: TranscriptionRequest, service: Service, metrics: ServerMetrics
) -> AsyncGenerator[dict[str, object]]:
    """Events with text that no longer changes, and one with the whole text at the end."""
    text, words = "", _Words(asked)
    async with aclosing(run_generations(service, [asked.request], metrics, asked.written)) as deltas:
        async for _, delta in deltas:
            if isinstance(delta, TextDelta):
                new = words.feed(delta.text)
            elif isinstance(delta, Finished):
                new = words.finish()
            else:
                continue
            new = new if text else new.lstrip()
            text += new
            if new:
                yield {"type": "transcript.text.delta", "delta": new}
            if isinstance(delta, Finished):
                yield {"type": "transcript.text.done", "text": text, "usage": _usage(delta, asked)}


def _usage(finished: Finished, asked: TranscriptionRequest) -> dict[str, Any]:
    """Usage in seconds or tokens, as OpenAI counts it for models that only transcribe and for those that chat."""
    if not asked.in_tokens:
        return {"type": "duration", "seconds": math.ceil(finished.audio_seconds)}
    usage = finished.usage
    read, made = usage.prompt_tokens, usage.completion_tokens
    kinds = {f"{kind}_tokens": usage.prompt_modalities.get(kind, 0) for kind in ("audio", "text")}
    totals = {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}
    return {"type": "tokens", **totals, "input_token_details": kinds}


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
            return EventStream(events(transcript_events(asked, service, metrics), named=True), settings.stall_seconds)
        whole = await while_connected(request.receive, transcript(asked, service, metrics))
        if asked.response_format in ("json", "verbose_json"):
            return json_response(json_object(whole, asked))
        return PlainTextResponse(plain_text(whole, asked.response_format))
