"""One stage inside a worker: its engine, and its current requests."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from segue.connectors.base import Connector
from segue.engines.autoregressive.contract import LoraHost
from segue.engines.contract import Engine, StageOutput, StageRequest, Transfer
from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.parts import CLIENT, is_input, number_of, own_name
from segue.kernels.device import end_where_lost
from segue.messages.deltas import ClientDelta, EncodedDelta, ImageDelta, ProgressDelta, VideoDelta
from segue.messages.errors import ConfigError, InvalidRequest, SegueError, StageFailed
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams, merged, turn_seed
from segue.messages.units import TurnEnd
from segue.messages.wire import AdapterLoaded, Begin, Chunk, Emission, LoadAdapter, OutputEnd, Peer, Return
from segue.worker.deltas import client_deltas, tokens_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Unused:
    """A chunk that an engine was fed and has not used yet."""

    source: str
    """Its upstream; empty if it is from a past attempt."""
    seq: int
    taken: tuple[Connector, dict[str, Any]] | None
    """Its payload, if it is released as soon as it has been used."""

    def release(self, request_id: str) -> None:
        """Release its payload, if it is not kept longer."""
        if self.taken is not None:
            connector, meta = self.taken
            connector.release(request_id, meta)


@dataclass(slots=True)
class Visit:
    """A request inside one stage, from `Begin` until its engine is done with it."""

    begin: Begin
    request: StageRequest
    self_peer: Peer
    upstreams: dict[str, Peer]
    next_seq: dict[str, int]
    began: float
    first: float = 0.0
    made: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(kind, output) → units made so far in this attempt, for the client or the output stage."""
    downstreams: list[Peer] = field(default_factory=list)
    """Receivers of this visit's output; none between two visits of a sequence that holds."""
    awaited: set[str] = field(default_factory=set)
    """Upstreams of this visit whose input is not complete; empty once a sequence that holds draws."""
    returns: deque[Return] = field(default_factory=deque)
    """Further visits of a sequence that holds, in order."""
    between: bool = False
    """It holds after a visit."""
    closed: bool = False
    """It has no further visit."""
    facts: dict[str, int | float | str | bool] = field(default_factory=dict)
    """As in `StageDone`."""
    ends: list[OutputEnd] = field(default_factory=list)
    """Ends of the finished outputs; the request is done when all have ended."""
    started: float = 0.0
    """When its first input arrived."""
    paused: bool = False
    client_behind: bool = False
    """Whether the client has too much left to read."""
    taken: list[tuple[Connector, dict[str, Any]]] = field(default_factory=list)
    """Payloads taken from connectors, released only when the stage is done with the request (the engine may hold views
    of shared memory)."""
    unused: deque[Unused] = field(default_factory=deque)
    """Chunks that the engine was fed and has not used yet, in order."""
    fed: dict[str, int] = field(default_factory=dict)
    """Upstream → number of chunks that an earlier attempt of it had sent."""
    complete: set[str] = field(default_factory=set)
    """Upstreams whose last chunk the engine has; a later attempt of them adds nothing."""

    @property
    def request_id(self) -> str:
        """The request's id; the engine's differs in later visits."""
        return self.begin.request.request_id

    def release(self) -> None:
        """Release all payloads taken for the request, which the engine no longer uses."""
        for connector, meta in self.taken:
            connector.release(self.request_id, meta)
        for chunk in self.unused:
            chunk.release(self.request_id)

    def receive(self, peers: list[Peer]) -> None:
        """Expect the input of a visit from these upstreams."""
        self.upstreams.update({peer.stage: peer for peer in peers})
        self.next_seq.update({peer.stage: 0 for peer in peers})
        self.awaited = {peer.stage for peer in peers}

    def moved(self, source: Peer) -> None:
        """Expect the chunks of an upstream's new attempt."""
        name = source.stage
        for coming in self.returns:
            coming.upstreams = [source if peer.stage == name else peer for peer in coming.upstreams]
        if name not in self.upstreams:
            return
        self.upstreams[name] = source
        self.fed[name] = max(self.fed.get(name, 0), self.next_seq[name])
        self.next_seq[name] = 0
        # the old attempt no longer needs to know that its chunks were used
        for chunk in self.unused:
            if chunk.source == name:
                chunk.source = ""


def timing(
    chunk: Chunk, attempt: int, upstreams: Mapping[str, Peer], next_seq: Mapping[str, int]
) -> Literal["early", "late", "now"]:
    """Return whether a visit can use a chunk now. Early: it is for a later attempt of the visit, or of a later attempt
    of its upstream, than the orchestrator has announced. Late: it is of the past, or a repetition.

    `attempt`: of the visit; `upstreams`, `next_seq`: what it expects from each upstream stage.
    """
    source = upstreams.get(chunk.source.stage)
    expected = source.attempt if source is not None else 0
    if chunk.source.attempt > expected or chunk.target_attempt > attempt:
        return "early"
    if chunk.source.attempt < expected or chunk.target_attempt < attempt:
        return "late"
    return "late" if chunk.seq < next_seq[chunk.source.stage] else "now"


@dataclass(slots=True)
class StageRunner:
    """A stage as the worker's loop sees it."""

    plan: StagePlan
    engine: Engine
    transfers: dict[str, Transfer]
    """Target stage → transfer function."""
    default_sampling: SamplingParams
    lora: LoraHost | None = None
    """The host of LoRA adapters, if the stage takes them."""
    visits: dict[str, Visit] = field(default_factory=dict)
    """By the request's id in the engine (`engine_id`)."""

    def visit(self, request_id: str, name: str) -> Visit | None:
        """Return a visit of the request by its name, if the engine has it."""
        return self.visits.get(engine_id(request_id, name))

    def begin(self, begin: Begin, self_peer: Peer) -> None:
        """Register the request with the engine. Raises `SegueError` if the engine refuses it."""
        asked = begin.request.sampling.get(self.plan.name)
        sampling = merged(request=asked, deployment=self.plan.sampling, family=self.default_sampling)
        seed = sampling.seed if sampling.seed is not None else begin.request.seed
        assert seed is not None, "the orchestrator gives every request a seed"
        number = number_of(begin.stage)
        upstreams = frozenset(own_name(peer.stage) for peer in begin.upstreams)
        if is_input(begin.stage) and begin.request.open:
            upstreams |= {CLIENT}
        request = StageRequest(
            request_id=engine_id(begin.request.request_id, begin.stage),
            stage=self.plan.name,
            request=_own(begin.request),
            sampling=sampling,
            seed=turn_seed(seed, number),
            upstreams=upstreams,
            downstreams=frozenset(map(own_name, [*(peer.stage for peer in begin.downstreams), *begin.served])),
            to_client=frozenset(begin.to_client),
            encoded=frozenset(begin.encoded),
            resume=begin.resume[0] if begin.resume else [],
            resume_others=begin.resume[1:],
            turns=begin.turns,
            visit=number,
            returns=begin.holds,
            priority=begin.request.priority if self.plan.scheduling == "priority" else 0,
        )
        visit = Visit(
            begin=begin,
            request=request,
            self_peer=self_peer,
            upstreams={},
            next_seq={},
            began=time.monotonic(),
            downstreams=begin.downstreams,
        )
        visit.receive(begin.upstreams)
        self.engine.add(request)
        self.visits[request.request_id] = visit

    def load(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return gauges of its requests. `stats`: the engine's. A request waits if it has input, the engine has made
        nothing of it, and the engine says that some wait."""
        now, age = time.monotonic(), 0.0
        if stats.get("waiting"):
            age = max(
                (now - visit.started for visit in self.visits.values() if visit.started and not visit.first),
                default=0.0,
            )
        return {"requests": float(len(self.visits)), "queue_age_seconds": age}

    def emission(self, visit: Visit, output: StageOutput) -> Emission | None:
        """Return the report of an output to the orchestrator, or None if there is nothing to report."""
        tokens = tokens_of(output)
        deltas = _numbered(client_deltas(visit.request, output, visit.made), visit)
        end = end_of(output) if output.finished and visit.request.outputs > 1 else None
        turn = turn_end_of(output) if output.turn_ended else None
        silent = not deltas and not tokens.token_ids and not output.prompt_tokens
        if silent and end is None and turn is None:
            return None
        return Emission(
            request_id=visit.request_id,
            stage=visit.begin.stage,
            attempt=visit.begin.attempt,
            index=output.index,
            units=list(tokens.codes or tokens.token_ids),
            first_index=tokens.first_index,
            turn=turn,
            deltas=deltas,
            prompt_tokens=output.prompt_tokens,
            cached_tokens=tokens.cached_tokens,
            modality_tokens=output.modality_tokens,
            end=end,
        )


def engine_id(request_id: str, visit: str) -> str:
    """Return the id by which a stage's engine knows a request: its visits may overlap while one is run again."""
    return f"{request_id}\0@{number_of(visit)}" if number_of(visit) else request_id


def _numbered(deltas: list[ClientDelta], visit: Visit) -> list[ClientDelta]:
    """Number the images, videos and files of a later visit after those of the visits before."""
    asked = visit.request.request.diffusion
    before = number_of(visit.begin.stage) * ((asked.num_images_per_prompt if asked is not None else None) or 1)
    if not before:
        return deltas
    numbered: list[ClientDelta] = []
    for delta in deltas:
        if isinstance(delta, ImageDelta | VideoDelta | ProgressDelta | EncodedDelta):
            numbered.append(msgspec.structs.replace(delta, index=delta.index + before))
        else:
            numbered.append(delta)
    return numbered


def facts_of(payload: Mapping[str, Any] | None) -> dict[str, int | float | str | bool]:
    """Return what conditions on outputs may look at in a payload: its numbers, texts and truth values."""
    return {key: value for key, value in (payload or {}).items() if isinstance(value, int | float | str | bool)}


def end_of(output: StageOutput) -> OutputEnd:
    """Return how a finished output ended."""
    tokens = tokens_of(output)
    return OutputEnd(output.index, output.finish_reason, tokens.cumulative_logprob, tokens.stop_reason)


def turn_end_of(output: StageOutput) -> TurnEnd:
    """Return how a turn ended."""
    tokens = tokens_of(output)
    return TurnEnd(tokens.first_index + len(tokens.token_ids), output.finish_reason, tokens.stop_reason)


def _own(request: Request) -> Request:
    """Return a request in the terms of its model, which knows its stages by their own names."""
    sampling = {own_name(stage): params for stage, params in request.sampling.items()}
    return msgspec.structs.replace(request, sampling=sampling)


def load_adapter(worker: str, stage: StageRunner, message: LoadAdapter) -> AdapterLoaded:
    """Load a LoRA adapter, between two steps."""
    lora = stage.lora
    assert lora is not None, "the orchestrator knows which stage takes adapters"
    try:
        lora.load(message.name, message.directory)
    except ConfigError as error:  # the error is in files that a client named, not in the deployment
        return AdapterLoaded(worker, message.ticket, InvalidRequest.__name__, error.message)
    except Exception as error:
        # files may hold anything, and a device may be full: the worker goes on
        failed = as_stage_error(error, message.stage)
        return AdapterLoaded(worker, message.ticket, type(failed).__name__, failed.message)
    return AdapterLoaded(worker, message.ticket)


def as_stage_error(error: Exception, stage: str) -> SegueError:
    """Turn an exception of model code into a failure of the stage. Raises `DeviceLost`."""
    if isinstance(error, SegueError):
        return error
    end_where_lost(error)
    log.error("stage %r raised an unexpected exception", stage, exc_info=error)
    failed = StageFailed(f"stage {stage!r}: {type(error).__name__}: {error}", stage=stage)
    failed.__cause__ = error
    return failed
