"""The books of one request: its walk, journal, what the client has, and its times."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from segue.graph.stage_graph import INPUT, Walk
from segue.messages.deltas import (
    AudioDelta,
    Choice,
    ChoiceEnded,
    ClassesDelta,
    ClientDelta,
    Delta,
    EmbeddingDelta,
    Finished,
    ImageDelta,
    ProgressDelta,
    RequestMetrics,
    ScoreDelta,
    TextDelta,
    TokensDelta,
    Usage,
    VideoDelta,
)
from segue.messages.errors import SegueError
from segue.messages.request import Request
from segue.messages.wire import Emission, OutputEnd, StageDone
from segue.orchestrator.recovery import StageBook


@dataclass(slots=True)
class RequestBooks:
    """Everything the orchestrator knows of a request; lives from admission until it is over."""

    request: Request
    walk: Walk
    main: str
    admitted: float = field(default_factory=time.monotonic)
    queue: asyncio.Queue[Delta | SegueError] = field(default_factory=asyncio.Queue)
    stages: dict[str, StageBook] = field(default_factory=dict)
    journal: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    """By autoregressive stage and output: every id it has emitted."""
    delivered: dict[tuple[str, int], int] = field(default_factory=dict)
    """By stage and output: characters or samples the client has."""
    shown: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """By stage, kind and number of a picture or video: steps told of, previews, pictures (1) or frames the client
    has."""
    waiting: set[str] = field(default_factory=set)
    """Stages to begin as soon as their groups have a ready worker."""
    losses: Counter[str] = field(default_factory=Counter)
    """By stage: how often its worker was lost with this request."""
    blamed: set[str] = field(default_factory=set)
    """Workers whose payloads were found missing; where one turns out to be dead, it is one loss, not two."""
    usage: Usage = field(default_factory=Usage)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    ends: list[OutputEnd] = field(default_factory=list)
    """Of the main stage's outputs, once it is done."""
    told: set[int] = field(default_factory=set)
    """Outputs of the main stage whose ends the client has."""
    timer: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        return self.request.request_id

    def workers(self) -> set[str]:
        return {book.worker for book in self.stages.values() if book.worker}

    def took(self, emission: Emission) -> list[Delta]:
        """Enter an emission; gives what the client does not have yet (an attempt starts its stream from the front)."""
        stage, place = emission.stage, (emission.stage, emission.index)
        fresh_ids: list[int] = []
        if emission.token_ids:
            journal = self.journal.setdefault(stage, {}).setdefault(emission.index, [])
            fresh_ids = emission.token_ids[max(0, len(journal) - emission.first_index) :]
            journal.extend(fresh_ids)
        if stage in (self.main, INPUT):  # whichever counts what the request brings
            self.usage.prompt_tokens = self.usage.prompt_tokens or emission.prompt_tokens
            self.usage.cached_tokens = self.usage.cached_tokens or emission.cached_tokens
            self.usage.prompt_modalities = self.usage.prompt_modalities or emission.modality_tokens
        position = emission.position
        fresh: list[Delta] = []
        for delta in emission.deltas:
            if isinstance(delta, ImageDelta | VideoDelta | ProgressDelta):
                if (unseen := self._unseen(delta)) is not None:
                    fresh.append(unseen)
                continue
            have = self.delivered.get(place, 0)
            new, length = _after(delta, have - position, fresh_ids)
            position += length
            self.delivered[place] = max(have, position)
            if new is not None:
                fresh.append(new)
                self._note_first(new)
        if emission.end is not None and stage == self.main and emission.index not in self.told:
            self.told.add(emission.index)
            fresh += [ChoiceEnded(stage, choice) for choice in self._choices([emission.end])]
        return fresh

    def _unseen(self, delta: ImageDelta | VideoDelta | ProgressDelta) -> ClientDelta | None:
        """What of pictures, frames or steps the client does not have. They carry their own place, as several outputs of
        one request may come in another order after a recovery."""
        if isinstance(delta, ProgressDelta):
            return delta if self._advance("progress", delta, delta.step) else None
        if isinstance(delta, VideoDelta):
            have = self.shown.get((delta.stage, "video", delta.index), 0)
            self._advance("video", delta, delta.first + delta.frames)
            return _frames_after(delta, have - delta.first)
        if delta.partial is None:
            if not self._advance("image", delta, 1):
                return None
            made = self.usage.completion_modalities
            if delta.tokens:
                made["image"] = made.get("image", 0) + delta.tokens
            return delta
        if (delta.stage, "image", delta.index) in self.shown:
            return None  # a preview of what is there already
        return delta if self._advance("partial", delta, delta.partial + 1) else None

    def _advance(self, kind: str, delta: ImageDelta | VideoDelta | ProgressDelta, to: int) -> bool:
        """Enter that the client has so many of a kind; False where it had them."""
        place = (delta.stage, kind, delta.index)
        if to <= self.shown.get(place, 0):
            return False
        self.shown[place] = to
        return True

    def ended(self, done: StageDone) -> None:
        """Enter the end of a stage."""
        self.stages[done.stage].done = True
        start = self.admitted
        for what, begin, end in (
            ("queue", done.began, done.started),
            ("first", done.started, done.first),
            ("run", done.first, done.ended),
        ):
            self.metrics.spans.append((done.stage, what, begin - start, end - start))
        if done.stage == self.main:
            self.ends = done.ends

    def resume(self, stage: str) -> list[list[int]]:
        """What an attempt of a stage goes on from: by output, the ids it has emitted."""
        journal = self.journal.get(stage, {})
        return [journal.get(index, []) for index in range(max(journal, default=-1) + 1)]

    def complete(self) -> bool:
        """True when every stage is done. Chunks go from worker to worker, and books by another way: the last stage may
        be done before those above it have told of their last ids."""
        return all(self.stages[name].done for name in self.walk)

    def given(self) -> bool:
        """True when the client has all that it asked for."""
        return all(self.stages[name].done for name, stage in self.walk.items() if stage.to_client)

    def finished(self) -> Finished:
        """The last delta."""
        self.metrics.jct = time.monotonic() - self.admitted
        self.metrics.attempts = 1 + self.losses.total()
        for stage, outputs in self.journal.items():
            # ids of a stage that the client does not see belong to what it is for: a talker's codes are audio
            kind = "text" if "text" in self.walk[stage].to_client else _modality_below(stage, self.walk)
            self.usage.completion_modalities[kind] = sum(map(len, outputs.values()))
        return Finished(
            finish_reason=self.ends[0].finish_reason if self.ends else "stop",
            token_ids={stage: list(outputs.get(0, [])) for stage, outputs in self.journal.items()},
            usage=self.usage,
            metrics=self.metrics,
            choices=self._choices(self.ends),
        )

    def _choices(self, ends: list[OutputEnd]) -> list[Choice]:
        journal = self.journal.get(self.main)
        if journal is None:
            return []  # of an engine that makes no tokens
        return [
            Choice(
                end.index, end.finish_reason, list(journal.get(end.index, [])), end.cumulative_logprob, end.stop_reason
            )
            for end in ends
        ]

    def _note_first(self, delta: ClientDelta) -> None:
        now = time.monotonic() - self.admitted
        if isinstance(delta, TextDelta) and self.metrics.ttft is None:
            self.metrics.ttft = now
        elif isinstance(delta, AudioDelta):
            if self.metrics.ttfa is None:
                self.metrics.ttfa = now
            self.metrics.audio_seconds += len(delta.samples) / 4 / delta.sample_rate


def _after(delta: ClientDelta, skip: int, fresh_ids: list[int]) -> tuple[ClientDelta | None, int]:
    """(the part of a delta behind its first `skip` units, or None; the whole delta's length in units)."""
    skip = max(0, skip)
    if isinstance(delta, TextDelta):
        text = delta.text[skip:]
        # log-probabilities stand beside the last ids of a delta: those that are new among them
        logprobs = delta.logprobs[-len(fresh_ids) :] if fresh_ids else []
        new = msgspec.structs.replace(delta, text=text, token_ids=fresh_ids, logprobs=logprobs)
        return (new if text or fresh_ids else None), len(delta.text)
    if isinstance(delta, AudioDelta):
        samples = delta.samples[4 * skip :]
        return (AudioDelta(delta.stage, samples, delta.sample_rate) if samples else None), len(delta.samples) // 4
    assert isinstance(delta, EmbeddingDelta | ScoreDelta | ClassesDelta | TokensDelta)
    return (None if skip else delta), 1


def _frames_after(delta: VideoDelta, skip: int) -> VideoDelta | None:
    """A piece of video without its first `skip` frames; None where nothing is left."""
    if skip <= 0:
        return delta
    if skip >= delta.frames:
        return None
    data = delta.data[skip * delta.height * delta.width * 3 :]
    return msgspec.structs.replace(delta, data=data, frames=delta.frames - skip, first=delta.first + skip)


def _modality_below(stage: str, walk: Walk) -> str:
    """The first modality that anything downstream of a stage gives the client."""
    frontier = list(walk[stage].downstreams)
    while frontier:
        entry = walk[frontier.pop(0)]
        if entry.to_client:
            return min(entry.to_client)
        frontier.extend(entry.downstreams)
    return stage
