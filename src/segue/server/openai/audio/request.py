"""Checks a transcription or translation request and converts it to a `Request`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from segue.messages.errors import InvalidRequest, TooLarge, nearest, shown, wrong
from segue.messages.request import MediaPart, Message, Part, Request, TextPart
from segue.messages.sampling import SamplingParams, check_sampling
from segue.models.shared.dialects.dialect import Dialect
from segue.orchestrator.service import ModelCard
from segue.server.generation.parameters import as_written, check_model, new_id, parse_body, turn_fields, with_model
from segue.server.http.errors import Unsupported, not_for_this_model
from segue.server.settings import ServerSettings

FILES = frozenset({"file"})
FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
_TIMED = frozenset({"verbose_json", "srt", "vtt"})
"""Formats with timestamps."""
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "include": ([],),
    "chunking_strategy": ("auto",),
    "known_speaker_names": ([],),
    "known_speaker_references": ([],),
}
"""Unsupported parameters of OpenAI's → values that have no effect."""
WRITTEN = {
    **{f"options.{name}": name for name in ("language", "prompt", "task")},
    "messages[0].content[1]": "prompt",
    "messages": "file",
}
"""Name in the request → name in the client's body."""
_ASKS = {
    "transcribe": "Transcribe the speech in this recording{known}. Write only the words that are said.",
    "translate": "Translate the speech in this recording{known} into English. Write only the translation.",
}
"""What a model that chats is asked, by task; `known`: the language, where the client gives it."""


class TranslationBody(msgspec.Struct, kw_only=True):
    """Every parameter that has an effect. null means not given."""

    file: Annotated[Any, msgspec.Meta(extra_json_schema={"type": "string", "format": "binary"})]
    model: str = ""
    language: str | None = None
    """Language of the recording; OpenAI has it only for transcriptions."""
    prompt: str | None = None
    response_format: str | None = None
    temperature: float | None = None
    stream: bool | None = None
    # additional
    seed: int | None = None
    priority: int | None = None
    user: str | None = None
    deadline: float | None = None
    """Seconds from now."""


class TranscriptionBody(TranslationBody, kw_only=True):
    """Additional parameters of a transcription, which keeps the recording's language."""

    timestamp_granularities: list[str] | None = None


@dataclass(frozen=True)
class TranscriptionRequest:
    """A checked request."""

    request: Request
    task: str
    response_format: str
    stream: bool
    temperature: float
    written: dict[str, str]
    """As in `Answering`."""
    dialect: Dialect
    """How to read the model's text: its thoughts are no part of the transcript."""
    in_tokens: bool
    """Usage is counted in tokens, not in seconds."""


def transcription_request(
    values: dict[str, Any], task: str, card: ModelCard, settings: ServerSettings
) -> TranscriptionRequest:
    """Convert the body. `task`: `transcribe` or `translate`. Raises `InvalidRequest` with parameter, value and
    remedy."""
    kind = TranscriptionBody if task == "transcribe" else TranslationBody
    body = parse_body(with_model(values, card, settings), kind, UNSUPPORTED, {})
    check_model(body.model, card, settings)
    chats = card.speech is None
    if card.text_stage is None or (chats and not ("audio" in card.takes and "text" in card.gives)):
        raise not_for_this_model("does not transcribe")
    if card.speech is not None and task not in card.speech.tasks:
        raise not_for_this_model("does not translate")
    form = _form(body, chats=chats)
    written = {**WRITTEN, f"sampling.{card.text_stage}.temperature": "temperature"}
    sampling = SamplingParams(temperature=body.temperature, logprobs=0 if form == "verbose_json" else None)
    if chats:  # its defaults are those of a conversation
        sampling = SamplingParams(temperature=body.temperature or 0.0, max_tokens=card.max_model_len)
    try:
        check_sampling(sampling, f"sampling.{card.text_stage}")
    except InvalidRequest as error:
        raise as_written(error, written) from error
    parts: list[Part] = [_recording(body.file, settings)]
    request = Request(
        request_id=new_id("transcript"),
        messages=[Message("user", [*parts, TextPart(_asked(task, body))] if chats else parts)],
        sampling={card.text_stage: sampling},
        seed=body.seed,
        options={} if chats else _options(task, body, form),
        adapter=body.model if body.model in card.adapters else None,
        **turn_fields(body.priority, body.user, body.deadline, time.time(), card),
    )
    return TranscriptionRequest(
        request,
        task,
        form,
        stream=bool(body.stream),
        temperature=body.temperature or 0.0,
        written=written,
        dialect=card.dialect,
        in_tokens=chats,
    )


def _form(body: TranslationBody, *, chats: bool) -> str:
    """The checked response format. `chats`: the model is asked in words, and gives no timestamps."""
    form = body.response_format or "json"
    if form not in FORMATS:
        raise wrong("response_format", form, f"one of {', '.join(FORMATS)}{nearest(form, FORMATS)}")
    if isinstance(body, TranscriptionBody):
        _check_granularities(body.timestamp_granularities, form)
    if chats and form in _TIMED:
        raise Unsupported(
            f"response_format is {form!r}, but this model gives no timestamps; use json or text",
            field="response_format",
        )
    if body.stream and form in _TIMED:
        raise Unsupported(f"stream is True with response_format {form!r}; use json or text", field="stream")
    return form


def _options(task: str, body: TranslationBody, form: str) -> dict[str, Any]:
    """The options of a request to a model that only transcribes."""
    return {
        "task": task,
        "timestamps": form in _TIMED,
        **({"language": body.language} if body.language else {}),
        **({"prompt": body.prompt} if body.prompt and body.prompt.strip() else {}),
    }


def _asked(task: str, body: TranslationBody) -> str:
    """The instruction for a model that chats, after the recording."""
    text = _ASKS[task].format(known=f", which is in the language {body.language!r}" if body.language else "")
    return f"{text}\nContext: {body.prompt}" if body.prompt and body.prompt.strip() else text


def _check_granularities(wanted: list[str] | None, form: str) -> None:
    if not wanted:
        return
    for one in wanted:
        if one == "word":
            raise Unsupported(
                "timestamp_granularities has 'word'; this server gives only times of segments: use 'segment'",
                field="timestamp_granularities",
            )
        if one != "segment":
            raise InvalidRequest(
                f"timestamp_granularities has {shown(one)}; it must be 'segment'", field="timestamp_granularities"
            )
    if form != "verbose_json":
        raise InvalidRequest(
            f"timestamp_granularities is given with response_format {form!r}; it needs verbose_json",
            field="timestamp_granularities",
        )


def _recording(file: Any, settings: ServerSettings) -> MediaPart:
    if not isinstance(file, bytes):
        raise wrong("file", file, "one file of a form (multipart/form-data)")
    if not file:
        raise InvalidRequest("file is empty; it must be a recording, e.g. WAV, MP3, FLAC, Ogg or M4A", field="file")
    if len(file) > settings.media.max_bytes:
        raise TooLarge(
            f"file has {len(file)} bytes; at most {settings.media.max_bytes} (max_media_bytes)", field="file"
        )
    return MediaPart("audio", file, field="file")
