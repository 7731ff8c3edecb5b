"""A recording written down: one request of a client, as the generations that `generate` of the library makes of it.

The language comes first, where it is not said: the likeliest of those that the model knows, after the first token. A
recording that fits into one window is one generation then, unless marks of time are wanted. Else windows are heard one
after the other, each from where the last time of the one before stands: the sequential long form of Radford et al.,
*Robust Speech Recognition via Large-Scale Weak Supervision*, §3.8, without its second tries at higher temperatures.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from segue.graph.parts import TOKENS
from segue.messages.deltas import Choice, Delta, Finished, SegmentDelta, TextDelta, TokensDelta, Usage
from segue.messages.errors import InvalidRequest, StageFailed, nearest
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.messages.speech import SpeechFacts
from segue.orchestrator.times import TimedText, frames_heard, spans_of, sure_spans, without_marks

Stream = Callable[[Request], AsyncGenerator[Delta]]


@dataclass(slots=True)
class _Written:
    """All windows so far."""

    ids: list[int] = field(default_factory=list)
    reason: str = "stop"
    first: Finished | None = None
    """Of the first window: when the text began."""
    usage: Usage = field(default_factory=Usage)

    def add(self, ended: Finished) -> None:
        self.first = self.first or ended
        if ended.finish_reason == "length":
            self.reason = "length"
        self.usage.prompt_tokens += ended.usage.prompt_tokens
        self.usage.cached_tokens += ended.usage.cached_tokens
        for ours, theirs in (
            (self.usage.prompt_modalities, ended.usage.prompt_modalities),
            (self.usage.completion_modalities, ended.usage.completion_modalities),
        ):
            for kind, count in theirs.items():
                ours[kind] = ours.get(kind, 0) + count


def check_transcription(request: Request, facts: SpeechFacts, stage: str) -> None:
    """Raise `InvalidRequest` naming the option, its value and what would be right."""
    options = request.options
    for name, kind, right in (
        ("language", str, "the code of a language"),
        ("task", str, "the name of a task"),
        ("prompt", str, "a text"),
        ("timestamps", bool, "true or false"),
    ):
        value = options.get(name)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest(f"{name} is {value!r}; it must be {right}", field=f"options.{name}")
    task = options.get("task")
    if task is not None and task not in facts.tasks:
        raise InvalidRequest(
            f"task is {task!r}; this model's tasks: {', '.join(facts.tasks)}{nearest(task, facts.tasks)}",
            field="options.task",
        )
    language = options.get("language")
    known = facts.languages or {"en": 0}  # the published models of one language write English
    if language is not None and language not in known:
        raise InvalidRequest(
            f"language is {language!r}, which this model does not know; it knows {', '.join(known)}",
            field="options.language",
        )
    sampling = request.sampling.get(stage, SamplingParams())
    asked: dict[str, object] = {
        "n": sampling.n,
        "best_of": sampling.best_of,
        "beam_width": sampling.beam_width,
        "stop": sampling.stop or None,
        "structured_outputs": sampling.structured_outputs,
    }
    for name, value in asked.items():
        if value not in (None, 1):
            raise InvalidRequest(
                f"sampling.{stage}.{name} is {value!r}; what is heard is written down once, and whole: leave it out",
                field=f"sampling.{stage}.{name}",
            )


async def transcribed(stream: Stream, request: Request, facts: SpeechFacts, stage: str) -> AsyncGenerator[Delta]:
    """Deltas as they are made, `Finished` last, as of one generation; its ids are those that the library's `generate`
    gives. Raises `SegueError`. `stream`: runs one generation; `stage`: the one that writes."""
    options = {name: value for name, value in request.options.items() if value is not None}
    seen = await _seen(stream, _part(request, "look", {**options, "language": next(iter(facts.languages), None)}))
    if TOKENS in request.modalities:
        yield seen
    options["timestamps"] = bool(options.get("timestamps")) or seen.frames > facts.window
    if facts.languages and options.get("language") is None:
        options["language"] = await _language(stream, request, options, facts, stage)
    written = _Written()
    if options["timestamps"]:
        made = _long(stream, request, options, facts, seen.frames, written)
    else:
        made = _plain(stream, _part(request, "0", options), facts, written)
    async with aclosing(made) as deltas:
        async for delta in deltas:
            yield delta
    assert written.first is not None
    yield msgspec.structs.replace(
        written.first,
        finish_reason=written.reason,
        token_ids={stage: written.ids},
        usage=written.usage,
        choices=[Choice(0, written.reason, written.ids)],
        language=options.get("language", "en"),
        audio_seconds=seen.seconds,
    )


def _part(request: Request, name: str, options: dict[str, Any]) -> Request:
    """One of the generations of a request."""
    return msgspec.structs.replace(
        request, request_id=f"{request.request_id}-{name}", modalities=["text"], options=options
    )


async def _seen(stream: Stream, look: Request) -> TokensDelta:
    """How long the recording is."""
    look.modalities = [TOKENS]
    seen: TokensDelta | None = None
    async with aclosing(stream(look)) as deltas:
        async for delta in deltas:
            if isinstance(delta, TokensDelta):
                seen = delta
    if seen is None:
        raise StageFailed("the input stage did not say what it heard")
    return seen


async def _language(stream: Stream, request: Request, options: dict[str, Any], facts: SpeechFacts, stage: str) -> str:
    """The likeliest code, as the library's `detect_language` finds it."""
    part = _part(request, "language", {**options, "detect": True})
    part.sampling = {
        stage: SamplingParams(
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=list(facts.languages.values()),
            suppress_tokens=[],
            repetition_penalty=1.0,
            detokenize=False,
        )
    }
    async with aclosing(stream(part)) as deltas:
        async for delta in deltas:
            if isinstance(delta, Finished):
                [token] = delta.token_ids[stage]
                return next(code for code, own in facts.languages.items() if own == token)
    raise StageFailed("no language was found")


async def _plain(stream: Stream, part: Request, facts: SpeechFacts, written: _Written) -> AsyncGenerator[Delta]:
    """One window without marks of time; where the model writes some anyway, they are no text."""
    async with aclosing(stream(part)) as deltas:
        async for delta in deltas:
            if isinstance(delta, TextDelta):
                yield msgspec.structs.replace(delta, text=without_marks(delta, facts.first_time))
            elif isinstance(delta, Finished):
                written.add(delta)
                written.ids += [token for ids in delta.token_ids.values() for token in ids]


async def _long(
    stream: Stream, request: Request, options: dict[str, Any], facts: SpeechFacts, frames: int, written: _Written
) -> AsyncGenerator[Delta]:
    """Window after window, by segments."""
    seek = 0
    while seek < frames:
        here = min(frames - seek, facts.window)
        text = TimedText(facts.first_time, seek)
        part = _part(request, str(seek), {**options, "seek": seek})
        async with aclosing(_window(stream, part, text, here, written)) as deltas:
            async for delta in deltas:
                yield delta
        seek += frames_heard(text.ids, facts, here)


async def _window(
    stream: Stream, part: Request, text: TimedText, frames: int, written: _Written
) -> AsyncGenerator[Delta]:
    """Segments as soon as they are sure; those of the last pair of marks, and what is behind it, at the end."""
    async with aclosing(stream(part)) as deltas:
        async for delta in deltas:
            made: list[TextDelta | SegmentDelta] = []
            if isinstance(delta, TextDelta):
                text.add(delta)
                made = text.give(sure_spans(text.ids, text.first), delta.stage)
            elif isinstance(delta, Finished):
                written.add(delta)
                [(stage, ids)] = delta.token_ids.items()
                text.ids = ids[:-1] if delta.finish_reason == "stop" else ids
                made = text.give(spans_of(text.ids, text.first, frames), stage)
            for one in made:
                if isinstance(one, SegmentDelta):
                    written.ids += one.token_ids
                yield one
