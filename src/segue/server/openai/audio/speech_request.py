"""Checks a request for speech and converts it to a `Request`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.media.sources import read_source
from segue.messages.errors import InvalidRequest, nearest, shown, wrong
from segue.messages.formats import FASTEST, SLOWEST, Format
from segue.messages.limits import check_carried
from segue.messages.request import MediaPart, Message, Part, Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.messages.speech import TextToSpeech
from segue.orchestrator.service import ModelCard
from segue.server.generation.parameters import check_model, new_id, parse_body, turn_fields, with_model
from segue.server.generation.sampling import stage_sampling
from segue.server.http.body import check_names
from segue.server.http.errors import Unsupported
from segue.server.settings import ServerSettings

MOST_CHARACTERS = 4096
"""Of `input`; OpenAI's limit."""
FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
"""Values of `response_format`, the default first."""
_OWN = {"pcm": "pcm16"}
"""OpenAI's name of a format → its name in `AUDIO_FORMATS`, if they differ."""
PCM_RATE = 24000
"""Samples per second of OpenAI's `pcm`, which has no header to state another."""
STREAMS = ("audio", "sse")
"""Values of `stream_format`, the default first."""
_UNSUPPORTED: dict[str, tuple[object, ...]] = {"stream": (False, True)}
"""The audio is always streamed."""
_OWN_OPTIONS = ("instructions", "language", "ref_text")
"""Options of families that have a parameter of the same name."""
WRITTEN: Mapping[str, str] = {
    "messages[0].content[0]": "input",
    "messages[0].content[1]": "input",
    "messages": "input",
    "append": "input",
    **{f"options.{name}": name for name in _OWN_OPTIONS},
}
"""Name in the request → name in the client's body."""


class VoiceId(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's other form of a voice."""

    id: str


class SpeechOptions(msgspec.Struct, kw_only=True):
    """Every parameter that has an effect, except the text. null means not given."""

    model: str = ""
    voice: str | VoiceId | None = None
    instructions: str | None = None
    response_format: str | None = None
    speed: float | None = None
    stream_format: str | None = None
    # additional
    language: str | None = None
    ref_audio: str | None = None
    """A recording of the voice to speak with: a data: URL, or one that the operator allows."""
    ref_text: str | None = None
    """What the recording says."""
    sampling: dict[str, dict[str, Any]] | None = None
    options: dict[str, Any] | None = None
    seed: int | None = None
    priority: int | None = None
    user: str | None = None
    deadline: float | None = None
    """Seconds from now."""


class SpeechBody(SpeechOptions, kw_only=True):
    """The parameters with the text."""

    input: str


@dataclass(frozen=True)
class SpeechRequest:
    """A checked request."""

    request: Request
    response_format: str
    stream_format: str

    def of_text(self, text: str, part: int = 0) -> Request:
        """The same request with another text. `part`: number of texts before it in the same file."""
        [message] = self.request.messages
        parts = [*message.content[:-1], TextPart(text)]
        return msgspec.structs.replace(
            self.request,
            request_id=new_id("speech"),
            messages=[msgspec.structs.replace(message, content=parts)],
            formats={"audio": msgspec.structs.replace(self.request.formats["audio"], part=part)},
        )


def speech_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> SpeechRequest:
    """Convert the body. Blocking (`ref_audio`). Raises `InvalidRequest` with parameter, value and remedy."""
    body = parse_body(with_model(values, card, settings), SpeechBody, _UNSUPPORTED, {})
    says = _says(body, card, settings)
    _check_input(body.input)
    return _asked(body, body.input, says, card, settings)


def speech_options(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> SpeechRequest:
    """Convert the parameters of a text that is still to come (`of_text`); otherwise as `speech_request`."""
    if "input" in values:
        raise InvalidRequest("input is given as a parameter, but the body is the text; leave it out", field="input")
    body = parse_body(with_model(values, card, settings), SpeechOptions, _UNSUPPORTED, {})
    return _asked(body, "", _says(body, card, settings), card, settings)


def _says(body: SpeechOptions, card: ModelCard, settings: ServerSettings) -> TextToSpeech:
    check_model(body.model, card, settings)
    if card.says is None:
        raise _cannot_say(body.model, card)
    return card.says


def _asked(
    body: SpeechOptions, text: str, says: TextToSpeech, card: ModelCard, settings: ServerSettings
) -> SpeechRequest:
    form = _one_of("response_format", body.response_format, FORMATS)
    stream = _one_of("stream_format", body.stream_format, STREAMS)
    speed = 1.0 if body.speed is None else body.speed
    if not SLOWEST <= speed <= FASTEST:
        raise wrong("speed", body.speed, f"a number from {SLOWEST:g} to {FASTEST:g}")
    voice = _voice(body, card)
    rate = PCM_RATE if form == "pcm" else None
    audio = Format(name=_OWN.get(form, form), rate=rate, speed=speed, base64=stream == "sse")
    parts: list[Part] = [TextPart(text)]
    if (recording := _recording(body, says, settings)) is not None:
        parts.insert(0, recording)
    request = Request(
        request_id=new_id("speech"),
        messages=[Message("user", parts)],
        modalities=["audio"],
        formats={"audio": audio},
        voice=voice,
        sampling=_sampling(body.sampling, card, says),
        seed=body.seed,
        options=_options(body, card, says),
        adapter=body.model if body.model in card.adapters else None,
        **turn_fields(body.priority, body.user, body.deadline, time.time(), card),
    )
    return SpeechRequest(request, form, stream)


def _cannot_say(model: str, card: ModelCard) -> Unsupported:
    takes, gives = (", ".join(sorted(kinds)) for kinds in (card.takes, card.gives))
    instead = "; it speaks its own replies in /v1/chat/completions" if "audio" in card.gives else ""
    said = f"model {model!r} cannot say a given text: it takes {takes} and gives {gives}{instead}"
    return Unsupported(said, field="model")


def _check_input(text: str) -> None:
    if not text.strip():
        raise wrong("input", text, "the text to say, at least one word")
    if len(text) > MOST_CHARACTERS:
        raise InvalidRequest(f"input has {len(text)} characters; at most {MOST_CHARACTERS} are taken", field="input")


def _one_of(name: str, value: str | None, known: tuple[str, ...]) -> str:
    if value is not None and value not in known:
        raise wrong(name, value, f"one of {', '.join(known)}{nearest(value, known)}")
    return known[0] if value is None else value


def _voice(body: SpeechOptions, card: ModelCard) -> str | None:
    field, voice = ("voice.id", body.voice.id) if isinstance(body.voice, VoiceId) else ("voice", body.voice)
    # while the model is loading, its voices are not known yet: then its stages check
    if voice is None or card.voices is None or voice in card.voices:
        return voice
    known = f"this model speaks with: {', '.join(card.voices)}" if card.voices else "this model has no voices"
    raise InvalidRequest(f"{field} is {shown(voice)}, which is not known; {known}", field=field)


def _recording(body: SpeechOptions, says: TextToSpeech, settings: ServerSettings) -> MediaPart | None:
    """The recording of the voice to clone."""
    if body.ref_audio is None:
        if body.ref_text is not None:
            raise InvalidRequest("ref_text is given without the recording that it is the text of", field="ref_text")
        return None
    if not says.cloning:
        raise Unsupported("ref_audio is given, but this model clones no voices; choose a voice", field="ref_audio")
    if not settings.allow_voice_cloning:
        raise Unsupported(
            "ref_audio is given, but this server clones no voices: its operator has not allowed it "
            "(--allow-voice-cloning); choose a voice",
            field="ref_audio",
        )
    if body.voice is not None:
        raise InvalidRequest("voice and ref_audio are given, but speech has one voice; give one", field="voice")
    data = read_source(body.ref_audio, settings.media.begun(), "ref_audio")
    return MediaPart("audio", data, role="voice", field="ref_audio")


def _sampling(
    sampling: dict[str, dict[str, Any]] | None, card: ModelCard, says: TextToSpeech
) -> dict[str, SamplingParams]:
    given = stage_sampling(sampling, card)
    return given | {stage: given.get(stage, SamplingParams()).over(usual) for stage, usual in says.sampling.items()}


def _options(body: SpeechOptions, card: ModelCard, says: TextToSpeech) -> dict[str, Any]:
    options = body.options or {}
    for name in _OWN_OPTIONS:
        if name in options:
            raise InvalidRequest(f"options has {name}; give {name} at the top of the request", field=f"options.{name}")
    check_names(options, card.options - set(says.options), "options")
    check_carried(options, "options")
    options = {**options, **says.options}
    if body.instructions:
        if not says.instructions:
            raise Unsupported("instructions are given, but this model takes none; leave them out", field="instructions")
        options["instructions"] = body.instructions
    if body.language:
        options["language"] = _language(body.language, says)
    if body.ref_text:
        options["ref_text"] = body.ref_text
    return options


def _language(asked: str, says: TextToSpeech) -> str:
    if not says.languages:
        raise Unsupported(f"language is {shown(asked)}, but this model takes none; leave it out", field="language")
    found = {name.lower(): name for name in says.languages}.get(asked.lower())
    if found is None:
        raise wrong("language", asked, f"one of {', '.join(says.languages)}")
    return found
