"""Transcribe a recording: split a client's request into the generations that the library's `generate` would run.

If the request names no language, it is detected first: the most likely of the model's languages after the first token.
A recording that fits into one window is then one generation, unless timestamps are requested. Otherwise windows are
transcribed one after the other, each from the last timestamp of the window before: the sequential long form of Radford
et al., *Robust Speech Recognition via Large-Scale Weak Supervision*, §3.8, without its retries at higher temperatures.

Timestamp tokens divide a window's text into segments, by the rules of the library
(`WhisperGenerationMixin._retrieve_segment`): two timestamps in a row end a segment. If there is at least one pair, the
next window transcribes everything after the last pair again, unless a single timestamp ends the text: then there was
no speech after it.

Optional reading: only for speech recognition: `transcribed` sends a recording in pieces, as requests.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from segue.graph.parts import TOKENS
from segue.messages.deltas import Choice, Delta, Finished, SegmentDelta, TextDelta, TokenLogprobs, TokensDelta, Usage
from segue.messages.errors import InvalidRequest, StageFailed, nearest
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.messages.speech import SECONDS_PER_FRAME, SECONDS_PER_TIME, SpeechFacts, time_mark


@dataclass(frozen=True, slots=True)
class Span:
    """One segment of a window's tokens."""

    start: int
    stop: int
    """Tokens [start, stop)."""
    begins: int
    ends: int
    """Time steps from the start of the window."""


def sure_spans(ids: Sequence[int], first: int) -> list[Span]:
    """Return the segments of an unfinished text that later tokens cannot change: all that end with a pair, except the
    last pair. `first`: the token of 0.00 seconds."""
    pairs = _pairs(ids, first)[:-1]
    return [_span(ids, first, start, stop, stop - 1) for start, stop in zip([0, *pairs], pairs, strict=False)]


def spans_of(ids: Sequence[int], first: int, frames: int) -> list[Span]:
    """Return the segments of a complete text, without its end token, of a window with `frames` frames of audio."""
    pairs = _pairs(ids, first)
    if not pairs:
        times = [token - first for token in ids if token >= first]
        # the library computes this in float32, which for some numbers gives one step less than exact arithmetic
        whole = int(np.float32(frames) * np.float32(SECONDS_PER_FRAME) / np.float32(SECONDS_PER_TIME))
        last = times[-1] if times and times[-1] else whole
        return [Span(0, len(ids), 0, last)] if ids else []
    single = _single(ids, first)
    stops = [*pairs, len(ids)] if single else [*pairs[:-1], pairs[-1] + 1]
    spans = [_span(ids, first, start, stop, stop - 1) for start, stop in zip([0, *stops], stops, strict=False)]
    if not single:  # the pair's second timestamp belongs to the segment, but does not mark its end
        last_start = stops[-2] if len(stops) > 1 else 0
        spans[-1] = _span(ids, first, last_start, stops[-1], stops[-1] - 2)
    return spans


def frames_transcribed(ids: Sequence[int], facts: SpeechFacts, frames: int) -> int:
    """Return the number of frames from the start of a window to the start of the next."""
    pairs = _pairs(ids, facts.first_time)
    if not pairs or _single(ids, facts.first_time):
        return frames
    return max(1, ids[pairs[-1] - 1] - facts.first_time) * facts.stride


def _pairs(ids: Sequence[int], first: int) -> list[int]:
    """Return the index of the second timestamp of each pair."""
    return [place for place in range(1, len(ids)) if ids[place] >= first and ids[place - 1] >= first]


def _single(ids: Sequence[int], first: int) -> bool:
    """Whether a single timestamp ends the text."""
    return [token >= first for token in ids[-2:]] == [False, True]


def _span(ids: Sequence[int], first: int, start: int, stop: int, end: int) -> Span:
    return Span(start, stop, ids[start] - first, ids[end] - first)


def without_marks(delta: TextDelta, first: int) -> str:
    """Return a delta's text without timestamps, which are in the text of the delta that has their token."""
    text = delta.text
    for token in delta.token_ids:
        if token >= first:
            text = text.replace(time_mark(token - first), "", 1)
    return text


@dataclass(slots=True)
class TimedText:
    """The output so far of the generation of one window."""

    first: int
    """The token of 0.00 seconds."""
    seek: int
    """The first frame of the window."""
    ids: list[int] = field(default_factory=list)
    given: int = 0
    """Number of tokens whose segments have been returned."""
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _text: str = ""
    """Text of the tokens after those."""

    def add(self, delta: TextDelta) -> None:
        self._text += delta.text
        self.ids += delta.token_ids
        self._logprobs += delta.logprobs

    def give(self, spans: Sequence[Span], stage: str) -> list[TextDelta | SegmentDelta]:
        """Return the text delta and the segment delta of each span that has not been returned yet."""
        made: list[TextDelta | SegmentDelta] = []
        for span in spans:
            if span.start < self.given:
                continue
            words, ids = self._words(span), self.ids[span.start : span.stop]
            logprobs = self._logprobs[span.start : span.stop]
            mean = sum(one.chosen.logprob for one in logprobs) / len(logprobs) if logprobs else None
            begins, ends = (
                round(self.seek * SECONDS_PER_FRAME + steps * SECONDS_PER_TIME, 2) for steps in (span.begins, span.ends)
            )
            self.given = span.stop
            made += [
                TextDelta(stage, words, ids, logprobs=logprobs),
                SegmentDelta(stage, begins, ends, words, ids, self.seek, mean),
            ]
        return made

    def _words(self, span: Span) -> str:
        pieces = []
        for token in self.ids[span.start : span.stop]:
            if token >= self.first:
                before, _, self._text = self._text.partition(time_mark(token - self.first))
                pieces.append(before)
        if self.ids[span.stop - 1] < self.first:  # the last segment has no end timestamp
            pieces.append(self._text)
            self._text = ""
        return "".join(pieces)


Stream = Callable[[Request], AsyncGenerator[Delta]]


@dataclass(slots=True)
class _Written:
    """The accumulated output of all windows so far."""

    ids: list[int] = field(default_factory=list)
    reason: str = "stop"
    first: Finished | None = None
    """`Finished` of the first window, which has the time of the first text."""
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
    """Raise `InvalidRequest` naming the option, its value and the remedy."""
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
    known = facts.languages or {"en": 0}  # the published models of one language are English
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
                f"sampling.{stage}.{name} is {value!r}; a transcription has one unconstrained output: leave it out",
                field=f"sampling.{stage}.{name}",
            )


async def transcribed(stream: Stream, request: Request, facts: SpeechFacts, stage: str) -> AsyncGenerator[Delta]:
    """Yield deltas as they are made, `Finished` last, as if there were one generation; the ids equal those of the
    library's `generate`. Raises `SegueError`. `stream`: runs one generation; `stage`: the stage that makes text."""
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
    """Return the request for one of the generations."""
    return msgspec.structs.replace(
        request, request_id=f"{request.request_id}-{name}", modalities=["text"], options=options
    )


async def _seen(stream: Stream, look: Request) -> TokensDelta:
    """Ask the input stage for the length of the recording."""
    look.modalities = [TOKENS]
    seen: TokensDelta | None = None
    async with aclosing(stream(look)) as deltas:
        async for delta in deltas:
            if isinstance(delta, TokensDelta):
                seen = delta
    if seen is None:
        raise StageFailed("the input stage did not report the recording's length")
    return seen


async def _language(stream: Stream, request: Request, options: dict[str, Any], facts: SpeechFacts, stage: str) -> str:
    """Return the most likely language code, as the library's `detect_language` does."""
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
    raise StageFailed("no language was detected")


async def _plain(stream: Stream, part: Request, facts: SpeechFacts, written: _Written) -> AsyncGenerator[Delta]:
    """Transcribe one window without timestamps; any that the model writes anyway are removed from the text."""
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
    """Transcribe window after window into segments."""
    seek = 0
    while seek < frames:
        here = min(frames - seek, facts.window)
        text = TimedText(facts.first_time, seek)
        part = _part(request, str(seek), {**options, "seek": seek})
        async with aclosing(_window(stream, part, text, here, written)) as deltas:
            async for delta in deltas:
                yield delta
        seek += frames_transcribed(text.ids, facts, here)


async def _window(
    stream: Stream, part: Request, text: TimedText, frames: int, written: _Written
) -> AsyncGenerator[Delta]:
    """Yield a window's segments as soon as they are final; those of the last pair, and all after it, at the end."""
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
