"""Text with marks of time: which segments its tokens make, and where the next window begins.

The rules are those of the library (`WhisperGenerationMixin._retrieve_segment`): two marks in a row end a segment; with
one pair at least, what follows the last pair is heard again in the next window, unless a single mark ends the text:
then nothing was said behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from segue.messages.deltas import SegmentDelta, TextDelta, TokenLogprobs
from segue.messages.speech import SECONDS_PER_FRAME, SECONDS_PER_TIME, SpeechFacts, time_mark


@dataclass(frozen=True, slots=True)
class Span:
    """A segment of a window's tokens."""

    start: int
    stop: int
    """Tokens [start, stop)."""
    begins: int
    ends: int
    """Steps of time from the window's beginning."""


def sure_spans(ids: Sequence[int], first: int) -> list[Span]:
    """The segments of a text that is being written which stay as they are, whatever comes: all that a pair ends, but
    for the last pair. `first`: the token of 0.00 seconds."""
    pairs = _pairs(ids, first)[:-1]
    return [_span(ids, first, start, stop, stop - 1) for start, stop in zip([0, *pairs], pairs, strict=False)]


def spans_of(ids: Sequence[int], first: int, frames: int) -> list[Span]:
    """The segments of a whole text, without its end token, of a window with so many `frames` of sound."""
    pairs = _pairs(ids, first)
    if not pairs:
        times = [token - first for token in ids if token >= first]
        # the library computes this in float32, which for some numbers is a step less than it might be
        whole = int(np.float32(frames) * np.float32(SECONDS_PER_FRAME) / np.float32(SECONDS_PER_TIME))
        last = times[-1] if times and times[-1] else whole
        return [Span(0, len(ids), 0, last)] if ids else []
    single = _single(ids, first)
    stops = [*pairs, len(ids)] if single else [*pairs[:-1], pairs[-1] + 1]
    spans = [_span(ids, first, start, stop, stop - 1) for start, stop in zip([0, *stops], stops, strict=False)]
    if not single:  # the second mark of the pair belongs to it, and is not its end
        last_start = stops[-2] if len(stops) > 1 else 0
        spans[-1] = _span(ids, first, last_start, stops[-1], stops[-1] - 2)
    return spans


def frames_heard(ids: Sequence[int], facts: SpeechFacts, frames: int) -> int:
    """How far behind a window's beginning the next one begins."""
    pairs = _pairs(ids, facts.first_time)
    if not pairs or _single(ids, facts.first_time):
        return frames
    return max(1, ids[pairs[-1] - 1] - facts.first_time) * facts.stride


def _pairs(ids: Sequence[int], first: int) -> list[int]:
    """Where the second mark of each pair stands."""
    return [place for place in range(1, len(ids)) if ids[place] >= first and ids[place - 1] >= first]


def _single(ids: Sequence[int], first: int) -> bool:
    """A lone mark ends the text."""
    return [token >= first for token in ids[-2:]] == [False, True]


def _span(ids: Sequence[int], first: int, start: int, stop: int, end: int) -> Span:
    return Span(start, stop, ids[start] - first, ids[end] - first)


def without_marks(delta: TextDelta, first: int) -> str:
    """Its text; a mark is written when its token is told."""
    text = delta.text
    for token in delta.token_ids:
        if token >= first:
            text = text.replace(time_mark(token - first), "", 1)
    return text


@dataclass(slots=True)
class TimedText:
    """What the generation of a window has given so far."""

    first: int
    """The token of 0.00 seconds."""
    seek: int
    """The frame at which the window begins."""
    ids: list[int] = field(default_factory=list)
    given: int = 0
    """Tokens whose segments were given out."""
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _text: str = ""
    """Of the tokens behind those."""

    def add(self, delta: TextDelta) -> None:
        self._text += delta.text
        self.ids += delta.token_ids
        self._logprobs += delta.logprobs

    def give(self, spans: Sequence[Span], stage: str) -> list[TextDelta | SegmentDelta]:
        """The text of each that was not given out yet, and the segment behind it."""
        made: list[TextDelta | SegmentDelta] = []
        for span in spans:
            if span.start < self.given:
                continue
            words, ids = self._words(span), self.ids[span.start : span.stop]
            told = self._logprobs[span.start : span.stop]
            mean = sum(one.chosen.logprob for one in told) / len(told) if told else None
            begins, ends = (
                round(self.seek * SECONDS_PER_FRAME + steps * SECONDS_PER_TIME, 2) for steps in (span.begins, span.ends)
            )
            self.given = span.stop
            made += [
                TextDelta(stage, words, ids, logprobs=told),
                SegmentDelta(stage, begins, ends, words, ids, self.seek, mean),
            ]
        return made

    def _words(self, span: Span) -> str:
        pieces = []
        for token in self.ids[span.start : span.stop]:
            if token >= self.first:
                before, _, self._text = self._text.partition(time_mark(token - self.first))
                pieces.append(before)
        if self.ids[span.stop - 1] < self.first:  # nothing is behind it
            pieces.append(self._text)
            self._text = ""
        return "".join(pieces)
