"""The state of one request: its walk, journal, delivered output and times; and `stages_to_rerun`, a pure function of
this state, which finds the stages that must restart when a worker is lost."""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

import msgspec

from segue.graph.course import Course
from segue.graph.parts import Outcome, number_of, stage_of, visit_name
from segue.graph.stage_graph import Walk
from segue.messages.addresses import node_of
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
from segue.messages.request import Appended, ArrayInfo, MediaPart, Request
from segue.messages.units import TurnEnd, Unit, ids_of
from segue.messages.wire import Emission, OutputEnd, StageDone
from segue.orchestrator.requests.client_queue import ClientQueue


@dataclass(slots=True)
class StageState:
    """The orchestrator's state of one visit of a stage, or of all visits of a sequence that holds."""

    upstreams: tuple[str, ...] = ()
    downstreams: tuple[str, ...] = ()
    undecided: bool = False
    """Further downstreams may want its output."""
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
    return (
        stage.done
        and not stage.undecided
        and all(stages[down].done or name in stages[down].inputs_done for down in stage.downstreams)
    )


def stages_to_rerun(stages: dict[str, StageState], alive: set[str], start: Iterable[str] = ()) -> set[str]:
    """Return the stages that must restart, given the workers that are alive. Those that have not started need not.

    A stage must restart if its worker is gone before it was settled. So must the upstream of a restarting stage if it
    cannot resend its chunks: its worker is gone as well, or it has freed them because this stage had finished. `start`
    names stages that must restart for another reason.
    """
    alive = alive | {""}
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


def stages_across(stages: dict[str, StageState], nodes: Set[str]) -> set[str]:
    """Return the stages at both ends of each edge between two nodes over which input has yet to come."""
    return {
        end
        for name, stage in stages.items()
        for up in stage.upstreams
        if {node_of(stage.address), node_of(stages[up].address)} == nodes and stage.worker and stages[up].worker
        if not stage.done and up not in stage.inputs_done
        for end in (name, up)
    }


@dataclass(slots=True)
class RequestState:
    """The orchestrator's whole state of a request, from admission until its end."""

    request: Request
    walk: Walk
    main: str
    queue: ClientQueue
    after: frozenset[str] = frozenset()
    """The workers that served the request that it goes on from."""
    admitted: float = field(default_factory=time.monotonic)
    held: str | None = None
    """In a walk with a loop: the stage that keeps its sequence, with its KV blocks, from one visit to the next."""
    stages: dict[str, StageState] = field(default_factory=dict)
    """By name of the visit; all visits of `held` by its name."""
    course: Course = field(init=False)
    _open: set[tuple[str, str]] = field(default_factory=set)
    """(visit, target) of edges that may be taken or not."""
    journal: dict[str, dict[int, list[Unit]]] = field(default_factory=dict)
    """Autoregressive stage → output → all units that it has emitted."""
    turns: dict[str, list[TurnEnd]] = field(default_factory=dict)
    """Autoregressive stage → the turns that ended among the units of its output, if the request is open; of `held`, the
    visits."""
    appended: list[Appended | None] = field(default_factory=list)
    """What was appended to the open request, in order; None: its input was closed."""
    delivered: dict[tuple[str, Stream], int] = field(default_factory=dict)
    """(visit, its output) → units that the client has."""
    slots: dict[str, None] = field(default_factory=dict)
    """Slots of the workers that have, or had, some of its stages."""
    waiting: set[str] = field(default_factory=set)
    """Stages to start as soon as their groups have a ready worker."""
    losses: Counter[str] = field(default_factory=Counter)
    """Stage → how often its worker was lost during this request."""
    blamed: set[str] = field(default_factory=set)
    """Workers whose payloads were found missing, or that a connection was lost to; if one turns out to be dead, that
    counts as one loss, not two."""
    usage: Usage = field(default_factory=Usage)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    images: dict[int, MediaPart] = field(default_factory=dict)
    """The images that the client got, if the request is to be kept."""
    ends: list[OutputEnd] = field(default_factory=list)
    """Ends of the main stage's outputs, once it is done."""
    ends_sent: set[int] = field(default_factory=set)
    """Outputs of the main stage whose ends have been sent to the client."""
    timer: asyncio.TimerHandle | None = None
    """Of its deadline."""
    patience: asyncio.TimerHandle | None = None
    """Set while it waits for nodes that cannot reach each other."""
    prefix: list[bytes] | None = None
    """Hash chain of its prompt, once a stage is routed by it (`segue.orchestrator.workers.affinity`)."""

    def __post_init__(self) -> None:
        self.course = Course(self.walk)

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

    def node(self, visit: str) -> str:
        """Return the name under which a visit is in `stages`."""
        return stage_of(visit) if stage_of(visit) == self.held else visit

    def visits_of(self, node: str) -> list[str]:
        """Return the visits that an entry of `stages` stands for."""
        return [visit_name(node, number) for number in range(self.course.last + 1)] if node == self.held else [node]

    def begin_visits(self) -> list[str]:
        """Begin the visits that can begin now, and return them."""
        new = self.course.advance()
        for visit in new:
            node = self.node(visit)
            here = self.stages.setdefault(node, StageState())
            upstreams = tuple(map(self.node, self.course.begun[visit]))
            here.upstreams += upstreams
            for up in upstreams:
                self.stages[up].downstreams += (node,)
        return new

    def decide(self) -> list[tuple[str, str]]:
        """Update which stages' output may yet be wanted. Returns the (source, target) of edges that are now known
        not to be taken."""
        forgone: list[tuple[str, str]] = []
        for node, stage in self.stages.items():
            stage.undecided = False
            for visit in self.visits_of(node):
                for target in self.course.targets(visit):
                    if not self.course.decided(visit, target):
                        stage.undecided = True
                        self._open.add((visit, target))
                    elif (visit, target) in self._open:
                        self._open.discard((visit, target))
                        if visit not in self.course.begun.get(target, ()):
                            forgone.append((node, self.node(target)))
        return forgone

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
            output = (stage, stream_of(delta))
            have = self.delivered.get(output, 0)
            self.delivered[output] = max(have, delta.end)
            if (new := after(delta, have, had_ids)) is not None:
                fresh.append(new)
                self._count(new)
                if self.request.keep:
                    self._retain(new)
        if emission.turn is not None:
            ended = self.turns.setdefault(stage, [])
            if not ended or emission.turn.units > ended[-1].units:
                ended.append(emission.turn)
                if stage == self.held:
                    self._visited(ended)
                elif stage == self.main:
                    fresh.append(TurnEnded(stage, emission.turn.finish_reason, emission.turn.stop_reason))
        if emission.end is not None and stage == self.main and emission.index not in self.ends_sent:
            self.ends_sent.add(emission.index)
            fresh += [ChoiceEnded(stage, choice) for choice in self._choices([emission.end])]
        return fresh

    def _visited(self, ended: list[TurnEnd]) -> None:
        """Record that the sequence that holds has ended another visit."""
        assert self.held is not None
        last, number = ended[-1], len(ended) - 1
        before = ended[-2].units if number else 0
        ids = ids_of(self.journal[self.held][0][before : last.units])
        outcome = Outcome(number, last.finish_reason, last.stop_reason, tuple(ids))
        self.course.end(visit_name(self.held, number), outcome, self.request)

    def ended(self, done: StageDone) -> None:
        """Record the end of a stage."""
        self.stages[done.stage].done = True
        if done.stage == self.held:
            self.course.finish()  # it may have ended by itself
        self.course.end(self.visits_of(done.stage)[-1], self._outcome(done), self.request)
        now = time.monotonic() - self.admitted
        for what, begin, end in (
            ("queue", done.began, done.started),
            ("first", done.started, done.first),
            ("run", done.first, 0.0),
        ):
            self.metrics.spans.append((stage_of(done.stage), what, now - begin, now - end))
        if stage_of(done.stage) == self.main:
            self.ends = done.ends

    def _outcome(self, done: StageDone) -> Outcome:
        end = done.ends[0] if done.ends else OutputEnd(0, "")
        ids = ids_of(self.journal.get(done.stage, {}).get(0, []))
        return Outcome(number_of(done.stage), end.finish_reason, end.stop_reason, tuple(ids), done.facts)

    def resume(self, stage: str) -> list[list[Unit]]:
        """Return the units that each output of a stage has emitted, from which a new attempt continues."""
        journal = self.journal.get(stage, {})
        return [journal.get(index, []) for index in range(max(journal, default=-1) + 1)]

    def complete(self) -> bool:
        """Whether every stage is done and none is visited again. Chunks go from worker to worker, reports another way:
        the last stage may be done before its upstreams have reported their last ids."""
        return self.course.over and all(stage.done for stage in self.stages.values())

    def given(self) -> bool:
        """Whether the client has all that it asked for."""
        answering = (node for name, node in self.stages.items() if self.walk[stage_of(name)].to_client)
        return self.course.over and all(node.done for node in answering)

    def finished(self) -> Finished:
        """Return the last delta."""
        self.metrics.jct = time.monotonic() - self.admitted
        self.metrics.attempts = 1 + self.losses.total()
        token_ids: dict[str, list[int]] = {}
        counts: Counter[str] = Counter()
        for visit, outputs in self.journal.items():
            # ids of an internal stage count for its downstream modality: a talker's codes are audio; but the tokens of
            # an image are latents, and ids before it are thoughts
            stage = stage_of(visit)
            kind = "text" if "text" in self.walk[stage].to_client else _modality_below(stage, self.walk)
            kind = "text" if kind == "image" else kind
            counts[stage] += sum(map(len, outputs.values()))
            self.usage.completion_modalities[kind] = counts[stage]
            token_ids[stage] = token_ids.get(stage, []) + ids_of(outputs.get(0, []))
        if self.course.stopped_by is not None:
            stop = f"the bound of edge {self.course.stopped_by}"
            self.ends = [msgspec.structs.replace(end, finish_reason="length", stop_reason=stop) for end in self.ends]
        return Finished(
            finish_reason=self.ends[0].finish_reason if self.ends else "stop",
            token_ids=token_ids,
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

    def _retain(self, delta: ClientDelta) -> None:
        """Retain what later requests cannot have from the journal."""
        match delta:
            case ImageDelta(partial=None):
                shape = ArrayInfo("uint8", (delta.height, delta.width, 3))
                self.images[delta.index] = MediaPart("image", delta.data, shape)
            case EncodedDelta(kind="image"):
                data = b64decode(delta.data) if self.request.formats["image"].base64 else delta.data
                have = self.images.get(delta.index, MediaPart("image", b"")).data
                self.images[delta.index] = MediaPart("image", have + data)

    def _count(self, delta: ClientDelta) -> None:
        """Count what the client gets."""
        if delta.kind in self.request.raw and not isinstance(delta, EncodedDelta):
            return  # the file is counted
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
