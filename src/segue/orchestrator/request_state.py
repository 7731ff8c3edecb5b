"""The state of one request: its walk, journal, delivered output and times; and `stages_to_rerun`, a pure function of
this state, which finds the stages that must restart when a worker is lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from segue.graph.stage_graph import Walk
from segue.messages.deltas import (
    AudioDelta,
    Choice,
    ChoiceEnded,
    ClientDelta,
    Delta,
    EncodedDelta,
    Finished,
    ImageDelta,
    RequestMetrics,
    Stream,
    TextDelta,
    TurnEnded,
    Usage,
    after,
    stream_of,
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
    delivered: dict[Stream, int] = field(default_factory=dict)
    """Output → units that the client has."""
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
        stage, had_ids = emission.stage, 0
        if emission.units:
            journal = self.journal.setdefault(stage, {}).setdefault(emission.index, [])
            had_ids = len(journal)
            journal.extend(emission.units[max(0, had_ids - emission.first_index) :])
        if stage in (self.reader, self.input):  # whichever of them counts the prompt
            self.usage.cached_tokens = self.usage.cached_tokens or emission.cached_tokens
            if emission.prompt_tokens > self.usage.prompt_tokens:  # input may be appended
                self.usage.prompt_tokens = emission.prompt_tokens
                self.usage.prompt_modalities = emission.modality_tokens
        fresh: list[Delta] = []
        for delta in emission.deltas:
            stream = stream_of(delta)
            have = self.delivered.get(stream, 0)
            self.delivered[stream] = max(have, delta.end)
            if (new := after(delta, have, had_ids)) is not None:
                fresh.append(new)
                self._count(new)
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

    def _count(self, delta: ClientDelta) -> None:
        """Count what the client gets."""
        now, tokens = time.monotonic() - self.admitted, 0
        match delta:
            case TextDelta():
                self.metrics.ttft = now if self.metrics.ttft is None else self.metrics.ttft
            case AudioDelta():
                self.metrics.ttfa = now if self.metrics.ttfa is None else self.metrics.ttfa
                self.metrics.audio_seconds += len(delta.samples) / 4 / delta.sample_rate
            case EncodedDelta(kind="audio"):
                self.metrics.ttfa = now if self.metrics.ttfa is None else self.metrics.ttfa
                self.metrics.audio_seconds = delta.facts["seconds"]
            case EncodedDelta():
                tokens = int(delta.facts.get("tokens", 0)) if delta.last else 0
            case ImageDelta():
                tokens = delta.tokens
        if tokens:
            made = self.usage.completion_modalities
            made[delta.kind] = made.get(delta.kind, 0) + tokens


def _modality_below(stage: str, walk: Walk) -> str:
    """Return the modality that the nearest downstream stage gives the client."""
    frontier = list(walk[stage].downstreams)
    while frontier:
        entry = walk[frontier.pop(0)]
        if given := entry.to_client | entry.encoded:
            return min(given)
        frontier.extend(entry.downstreams)
    return stage
