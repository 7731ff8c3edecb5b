"""The state of one request: its walk, journal, delivered output and times; and `stages_to_rerun`, a pure function of
this state, which finds the stages that must restart when a worker is lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from segue.graph.stage_graph import Walk
from segue.messages.deltas import (
    AudioDelta,
    Choice,
    ChoiceEnded,
    ClassesDelta,
    ClientDelta,
    Delta,
    EmbeddingDelta,
    EncodedDelta,
    Finished,
    ImageDelta,
    ProgressDelta,
    RequestMetrics,
    ScoreDelta,
    TextDelta,
    TokensDelta,
    TurnEnded,
    Usage,
    VideoDelta,
    after,
)
from segue.messages.request import Piece, Request
from segue.messages.units import TurnEnd, Unit, ids_of
from segue.messages.wire import Emission, OutputEnd, StageDone
from segue.orchestrator.client_queue import ClientQueue


@dataclass(slots=True)
class StageState:
    """The orchestrator's state of one stage of one request."""

    upstreams: tuple[str, ...]
    downstreams: tuple[str, ...]
    worker: str = ""
    """The worker incarnation that runs it; empty before the first."""
    address: str = ""
    attempt: int = 0
    done: bool = False
    inputs_done: set[str] = field(default_factory=set)
    """Upstreams whose last chunk it has received in this attempt."""


def settled(name: str, stages: dict[str, StageState]) -> bool:
    """Whether nobody needs this stage or its worker's retained payloads any more."""
    stage = stages[name]
    return stage.done and all(stages[down].done or name in stages[down].inputs_done for down in stage.downstreams)


def stages_to_rerun(stages: dict[str, StageState], alive: set[str], start: Iterable[str] = ()) -> set[str]:
    """Return the stages that must restart, given the workers that are alive.

    A stage must restart if its worker is gone before it was settled. So must the upstream of a restarting stage if it
    cannot resend its chunks: its worker is gone as well, or it has freed them because this stage had finished. `start`
    names stages that must restart for another reason.
    """
    again = set(start)
    again.update(name for name, stage in stages.items() if stage.worker not in alive and not settled(name, stages))
    frontier = list(again)
    while frontier:
        name = frontier.pop()
        for up in stages[name].upstreams:
            gone = stages[up].worker not in alive
            if up not in again and (gone or stages[name].done):
                again.add(up)
                frontier.append(up)
    return again


@dataclass(slots=True)
class RequestState:
    """The orchestrator's whole state of a request, from admission until its end."""

    request: Request
    walk: Walk
    main: str
    queue: ClientQueue
    admitted: float = field(default_factory=time.monotonic)
    stages: dict[str, StageState] = field(default_factory=dict)
    journal: dict[str, dict[int, list[Unit]]] = field(default_factory=dict)
    """Autoregressive stage → output → all units that it has emitted."""
    turns: dict[str, list[TurnEnd]] = field(default_factory=dict)
    """Autoregressive stage → the turns that ended among the units of its output, if the request is open."""
    appended: list[Piece | None] = field(default_factory=list)
    """What was appended to the open request, in order; None: its input was closed."""
    delivered: dict[tuple[str, int], int] = field(default_factory=dict)
    """(stage, output) → number of characters or samples that the client has."""
    shown: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """(stage, kind, index of an output) → number of steps reported, or of previews, images (1), frames or units of
    files that the client has."""
    waiting: set[str] = field(default_factory=set)
    """Stages to start as soon as their groups have a ready worker."""
    losses: Counter[str] = field(default_factory=Counter)
    """Stage → how often its worker was lost during this request."""
    blamed: set[str] = field(default_factory=set)
    """Workers whose payloads were found missing; if one turns out to be dead, that counts as one loss, not two."""
    usage: Usage = field(default_factory=Usage)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    ends: list[OutputEnd] = field(default_factory=list)
    """Ends of the main stage's outputs, once it is done."""
    ends_sent: set[int] = field(default_factory=set)
    """Outputs of the main stage whose ends have been sent to the client."""
    timer: asyncio.TimerHandle | None = None
    prefix: list[bytes] | None = None
    """Hash chain of its prompt, once a stage is routed by it (`segue.orchestrator.workers.affinity`)."""

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def input(self) -> str:
        """The input stage, the first of every walk."""
        return next(iter(self.walk))

    @property
    def reader(self) -> str:
        """The stage whose prompt is the request's: the main one, or, if that draws no tokens, the first that does."""
        return self.main if self.main in self.journal else next(iter(self.journal), self.main)

    def workers(self) -> set[str]:
        return {stage.worker for stage in self.stages.values() if stage.worker}

    def took(self, emission: Emission) -> list[Delta]:
        """Record an emission; return the deltas that the client does not have (each attempt streams from the start)."""
        stage, place = emission.stage, (emission.stage, emission.index)
        fresh_ids: list[int] = []
        if emission.units:
            journal = self.journal.setdefault(stage, {}).setdefault(emission.index, [])
            fresh_units = emission.units[max(0, len(journal) - emission.first_index) :]
            journal.extend(fresh_units)
            fresh_ids = ids_of(fresh_units)
        if stage in (self.reader, self.input):  # whichever of them counts the prompt
            self.usage.cached_tokens = self.usage.cached_tokens or emission.cached_tokens
            if emission.prompt_tokens > self.usage.prompt_tokens:  # input may be appended
                self.usage.prompt_tokens = emission.prompt_tokens
                self.usage.prompt_modalities = emission.modality_tokens
        position = emission.position
        fresh: list[Delta] = []
        for delta in emission.deltas:
            if isinstance(delta, ImageDelta | VideoDelta | EncodedDelta | ProgressDelta):
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
        if emission.turn is not None:
            ended = self.turns.setdefault(stage, [])
            if not ended or emission.turn.units > ended[-1].units:
                ended.append(emission.turn)
                if stage == self.main:
                    fresh.append(TurnEnded(stage, emission.turn.finish_reason, emission.turn.stop_reason))
        if emission.end is not None and stage == self.main and emission.index not in self.ends_sent:
            self.ends_sent.add(emission.index)
            fresh += [ChoiceEnded(stage, choice) for choice in self._choices([emission.end])]
        return fresh

    def _unseen(self, delta: ImageDelta | VideoDelta | EncodedDelta | ProgressDelta) -> ClientDelta | None:
        """Return the part of images, frames, files or steps that the client does not have. They carry their own index,
        because a recovery may change the order of a request's outputs."""
        if isinstance(delta, EncodedDelta):
            place = (delta.stage, delta.kind, delta.output)
            have = self.shown.get(place, 0)
            self.shown[place] = max(have, delta.end)
            if (new := after(delta, have)) is not None:
                self._note_first(new)
                if new.last and (tokens := int(new.facts.get("tokens", 0))):
                    made = self.usage.completion_modalities
                    made[new.kind] = made.get(new.kind, 0) + tokens
            return new
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
            return None  # a preview of an image that the client already has
        return delta if self._advance("partial", delta, delta.partial + 1) else None

    def _advance(self, kind: str, delta: ImageDelta | VideoDelta | ProgressDelta, to: int) -> bool:
        """Record that the client has `to` units of a kind; False if it already had them."""
        place = (delta.stage, kind, delta.index)
        if to <= self.shown.get(place, 0):
            return False
        self.shown[place] = to
        return True

    def ended(self, done: StageDone) -> None:
        """Record the end of a stage."""
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

    def resume(self, stage: str) -> list[list[Unit]]:
        """Return the units that each output of a stage has emitted, from which a new attempt continues."""
        journal = self.journal.get(stage, {})
        return [journal.get(index, []) for index in range(max(journal, default=-1) + 1)]

    def complete(self) -> bool:
        """Whether every stage is done. Chunks go from worker to worker, reports another way: the last stage may be done
        before its upstreams have reported their last ids."""
        return all(self.stages[name].done for name in self.walk)

    def given(self) -> bool:
        """Whether the client has all that it asked for."""
        return all(self.stages[name].done for name, stage in self.walk.items() if stage.to_client)

    def finished(self) -> Finished:
        """Return the last delta."""
        self.metrics.jct = time.monotonic() - self.admitted
        self.metrics.attempts = 1 + self.losses.total()
        for stage, outputs in self.journal.items():
            # ids of an internal stage count for its downstream modality: a talker's codes are audio
            kind = "text" if "text" in self.walk[stage].to_client else _modality_below(stage, self.walk)
            self.usage.completion_modalities[kind] = sum(map(len, outputs.values()))
        return Finished(
            finish_reason=self.ends[0].finish_reason if self.ends else "stop",
            token_ids={stage: ids_of(outputs.get(0, [])) for stage, outputs in self.journal.items()},
            usage=self.usage,
            metrics=self.metrics,
            choices=self._choices(self.ends),
        )

    def _choices(self, ends: list[OutputEnd]) -> list[Choice]:
        journal = self.journal.get(self.main)
        if journal is None:
            return []  # the engine makes no tokens
        return [
            Choice(
                end.index,
                end.finish_reason,
                ids_of(journal.get(end.index, [])),
                end.cumulative_logprob,
                end.stop_reason,
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
        elif isinstance(delta, EncodedDelta) and delta.kind == "audio":
            if self.metrics.ttfa is None:
                self.metrics.ttfa = now
            self.metrics.audio_seconds = delta.facts["seconds"]


def _after(delta: ClientDelta, skip: int, fresh_ids: list[int]) -> tuple[ClientDelta | None, int]:
    """Return (the delta without its first `skip` units, or None if nothing is left; the whole delta's length)."""
    skip = max(0, skip)
    if isinstance(delta, TextDelta):
        text = delta.text[skip:]
        # log-probabilities belong to the last ids of a delta: keep those of the new ids
        logprobs = delta.logprobs[-len(fresh_ids) :] if fresh_ids else []
        new = msgspec.structs.replace(delta, text=text, token_ids=fresh_ids, logprobs=logprobs)
        return (new if text or fresh_ids else None), len(delta.text)
    if isinstance(delta, AudioDelta):
        samples = delta.samples[4 * skip :]
        return (AudioDelta(delta.stage, samples, delta.sample_rate) if samples else None), len(delta.samples) // 4
    assert isinstance(delta, EmbeddingDelta | ScoreDelta | ClassesDelta | TokensDelta)
    return (None if skip else delta), 1


def _frames_after(delta: VideoDelta, skip: int) -> VideoDelta | None:
    """Return a piece of video without its first `skip` frames; None if nothing is left."""
    if skip <= 0:
        return delta
    if skip >= delta.frames:
        return None
    data = delta.data[skip * delta.height * delta.width * 3 :]
    return msgspec.structs.replace(delta, data=data, frames=delta.frames - skip, first=delta.first + skip)


def _modality_below(stage: str, walk: Walk) -> str:
    """Return the modality that the nearest downstream stage gives the client."""
    frontier = list(walk[stage].downstreams)
    while frontier:
        entry = walk[frontier.pop(0)]
        if given := entry.to_client | entry.encoded:
            return min(given)
        frontier.extend(entry.downstreams)
    return stage
