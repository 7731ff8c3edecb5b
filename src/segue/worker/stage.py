"""One stage inside a worker: its engine, and its current requests."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from segue.connectors.base import Connector
from segue.engines.autoregressive.contract import LoraHost
from segue.engines.autoregressive.hold import turn_seed
from segue.engines.contract import Engine, StageOutput, StageRequest, Transfer
from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.parts import CLIENT, OUTPUT, TOKENS, full_name, is_built_in, is_input, member_of, number_of, own_name
from segue.kernels.device import end_where_lost
from segue.media.files import PREVIEW
from segue.messages.deltas import (
    AudioDelta,
    ClassesDelta,
    ClientDelta,
    EmbeddingDelta,
    EncodedDelta,
    ImageDelta,
    ProgressDelta,
    ScoreDelta,
    TextDelta,
    TokensDelta,
    VideoDelta,
)
from segue.messages.errors import ConfigError, InvalidRequest, SegueError, StageFailed
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams, merged
from segue.messages.units import TurnEnd
from segue.messages.wire import AdapterLoaded, Begin, Emission, LoadAdapter, OutputEnd, Peer, Return

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
        deltas = _numbered(client_deltas(visit.request, output, visit.made), visit)
        end = end_of(output) if output.finished and visit.request.outputs > 1 else None
        turn = turn_end_of(output) if output.turn_ended else None
        if not deltas and not output.token_ids and not output.prompt_tokens and end is None:
            return None
        return Emission(
            request_id=visit.request_id,
            stage=visit.begin.stage,
            attempt=visit.begin.attempt,
            index=output.index,
            units=list(output.codes or output.token_ids),
            first_index=output.first_index,
            turn=turn,
            deltas=deltas,
            prompt_tokens=output.prompt_tokens,
            cached_tokens=output.cached_tokens,
            modality_tokens=output.modality_tokens,
            end=end,
        )

    def for_output(self, visit: Visit, output: StageOutput) -> dict[str, Any] | None:
        """Return the parts of an output (`segue.media.files`) that go into the client's files."""
        payload: dict[str, Any] = output.payload or {}
        encoded = visit.request.encoded
        parts: list[dict[str, Any]] = []
        if "audio" in encoded and "samples" in payload and payload["samples"].numel():
            samples = payload["samples"].detach().float().cpu()
            rate = int(payload["sample_rate"])
            start = visit.made["audio", 0]
            parts.append({"kind": "audio", "output": 0, "start": start, "data": samples, "sample_rate": rate})
            visit.made["audio", 0] += len(samples)
        if encoded and "image" in payload and "image" in visit.request.request.formats:
            parts.append(_image_part(self.plan.name, payload))
        if "video" in encoded and "video" in payload:
            parts.append(_video_part(self.plan.name, payload))
        return {"parts": parts} if parts else None


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
    return OutputEnd(output.index, output.finish_reason, output.cumulative_logprob, output.stop_reason)


def turn_end_of(output: StageOutput) -> TurnEnd:
    """Return how a turn ended."""
    return TurnEnd(output.first_index + len(output.token_ids), output.finish_reason, output.stop_reason)


def _own(request: Request) -> Request:
    """Return a request in the terms of its model, which knows its stages by their own names."""
    sampling = {own_name(stage): params for stage, params in request.sampling.items()}
    return msgspec.structs.replace(request, sampling=sampling)


CLIENT_KEYS = {
    "audio": "samples",
    "image": "image",
    "video": "video",
    "embedding": "embedding",
    "score": "score",
    "classes": "classes",
}
"""Modality → the key of a payload under which the client's data stand (`segue.engines.module.contract.Result`)."""


def _check_payload(request: StageRequest, payload: Mapping[str, Any]) -> None:
    """Raise `StageFailed` for a payload without anything that the client receives, which would be lost silently."""
    wanted = sorted(CLIENT_KEYS.keys() & (request.to_client | request.encoded))
    if not wanted or not payload or is_built_in(request.stage):
        return
    if payload.keys().isdisjoint(CLIENT_KEYS.values()):
        right = ", ".join(f"{name} under {CLIENT_KEYS[name]!r}" for name in wanted)
        raise StageFailed(f"stage {request.stage!r} gave a payload with {sorted(payload)}; it must have {right}")
    if "samples" in payload and not isinstance(payload["samples"], torch.Tensor):
        raise StageFailed(
            f"stage {request.stage!r} gave samples of type {type(payload['samples']).__name__}; they must be a tensor"
        )


def client_deltas(request: StageRequest, output: StageOutput, made: Counter[tuple[str, int]]) -> list[ClientDelta]:
    """Return the part of an output that the client asked for; data only for the client leave the payload.

    `made` counts the units of the request's outputs so far. Raises `StageFailed` for a payload that has nothing of it.
    """
    payload: dict[str, Any] = output.payload or {}
    _check_payload(request, payload)
    if own_name(request.stage) == OUTPUT:
        member = member_of(request.stage)
        files = payload.get("deltas", ())
        return [msgspec.structs.replace(delta, stage=full_name(member, delta.stage)) for delta in files]
    deltas: list[ClientDelta] = []

    def place(kind: str) -> dict[str, int]:
        return {"index": output.index, "start": made[kind, output.index]}

    if "text" in request.to_client and (output.text or output.token_ids):
        deltas.append(
            TextDelta(
                request.stage,
                output.text,
                output.token_ids,
                output.first_index,
                logprobs=output.logprobs,
                prompt_token_ids=output.prompt_token_ids,
                prompt_logprobs=output.prompt_logprobs,
                **place("text"),
            )
        )
    if "audio" in request.to_client and "samples" in payload:
        samples = payload["samples"]
        if samples.numel():
            deltas.append(AudioDelta(request.stage, _floats(samples), int(payload["sample_rate"]), **place("audio")))
    if "embedding" in request.to_client and "embedding" in payload:
        deltas.append(EmbeddingDelta(request.stage, _floats(payload["embedding"]), **place("embedding")))
    if "score" in request.to_client and "score" in payload:
        deltas.append(ScoreDelta(request.stage, float(payload["score"]), **place("score")))
    if "classes" in request.to_client and "classes" in payload:
        classes = _floats(payload["classes"])
        deltas.append(ClassesDelta(request.stage, classes, payload["label"], **place("classes")))
    if TOKENS in request.to_client and TOKENS in payload:
        tokens: dict[str, Any] = {**payload.pop(TOKENS), **place(TOKENS)}
        deltas.append(TokensDelta(request.stage, **tokens))
    # previews go to the client even if it asked for a video
    if "image" in payload and ("image" in request.to_client or (request.to_client and "partial" in payload)):
        deltas.append(_image(request.stage, payload))
    if "video" in request.to_client and "video" in payload:
        deltas.append(_video(request.stage, payload))
    asked = request.request.diffusion
    if output.progress is not None and asked is not None and asked.progress:
        deltas.append(ProgressDelta(request.stage, *output.progress, output.index))
    for delta in deltas:
        made[delta.kind, delta.index] = delta.end
    return deltas


def _floats(tensor: Any) -> bytes:
    """Convert a tensor to little-endian float32."""
    data: bytes = tensor.detach().float().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes()
    return data


def _pixels(stage: str, payload: dict[str, Any]) -> Any:
    """[h, w, 3] uint8 on the CPU."""
    image = payload["image"]
    if image.ndim != 3 or image.shape[2] != 3:
        raise StageFailed(f"stage {stage!r} gave an image of shape {tuple(image.shape)}, not [h, w, 3]")
    return image.cpu()


def _image(stage: str, payload: dict[str, Any]) -> ImageDelta:
    """Make a delta of `{"image": uint8 [h, w, 3], "index": int, "partial": int | None}`; the last two are optional."""
    image = _pixels(stage, payload)
    height, width, _ = image.shape
    data = image.numpy().tobytes()
    return ImageDelta(
        stage, data, height, width, payload.get("index", 0), payload.get("partial"), payload.get("latent_tokens", 0)
    )


def _image_part(stage: str, payload: dict[str, Any]) -> dict[str, Any]:
    """The same as a part for the output stage."""
    partial = payload.get("partial")
    return {
        "kind": "image" if partial is None else PREVIEW,
        "output": payload.get("index", 0),
        "start": partial or 0,
        "data": _pixels(stage, payload)[None],
        "tokens": 0 if partial is not None else payload.get("latent_tokens", 0),
    }


def _frames(stage: str, payload: dict[str, Any]) -> Any:
    """[frames, h, w, 3] uint8 on the CPU."""
    video = payload["video"]
    if video.ndim != 4 or video.shape[3] != 3:
        raise StageFailed(f"stage {stage!r} gave frames of shape {tuple(video.shape)}, not [frames, h, w, 3]")
    return video.cpu()


def _video(stage: str, payload: dict[str, Any]) -> VideoDelta:
    """Make a delta of `{"video": uint8 [frames, h, w, 3], "fps": float, "index", "first": int}`; last two optional."""
    video = _frames(stage, payload)
    frames, height, width, _ = video.shape
    data = video.numpy().tobytes()
    return VideoDelta(
        stage, data, frames, height, width, float(payload["fps"]), payload.get("index", 0), payload.get("first", 0)
    )


def _video_part(stage: str, payload: dict[str, Any]) -> dict[str, Any]:
    """The same as a part for the output stage."""
    return {
        "kind": "video",
        "output": payload.get("index", 0),
        "start": payload.get("first", 0),
        "data": _frames(stage, payload),
        "fps": float(payload["fps"]),
    }


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
