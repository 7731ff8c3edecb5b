"""Every control message that crosses a process, and the one codec for them (msgpack by msgspec).

    orchestrator → worker   Begin, Resend, Moved, Drop, PeerLost, LoadAdapter, UnloadAdapter, Ping, Shutdown
    worker → orchestrator   Loading, Ready, StartFailed, Progress, InputDone, InputLost, StageDone, Failed, Stats,
                            AdapterLoaded
    worker → worker         Chunk, Consumed

Payloads never travel here: a `Chunk` carries the connector's metadata. Every message about a request carries the
attempt of the stage it speaks for; what speaks for an attempt that is over is dropped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from segue.messages.deltas import ClientDelta
from segue.messages.request import Request
from segue.messages.stats import WorkerStats


class Peer(msgspec.Struct, frozen=True):
    """One end of an edge: the stage, and the worker that runs it for this request."""

    stage: str
    worker: str
    """Unique per incarnation: a restarted worker is another one."""
    address: str
    """Its inbox."""
    attempt: int


# ── orchestrator → worker ──────────────────────────────────────────────────────────────────────────────────────────


class Begin(msgspec.Struct, tag=True):
    """Run `stage` for a request. Only the input stage gets the messages; the others' are stripped."""

    request: Request
    stage: str
    attempt: int
    upstreams: list[Peer]
    downstreams: list[Peer]
    to_client: list[str]
    resume: list[list[int]] = []
    """By output: the ids that the journal holds from an earlier attempt."""


class Resend(msgspec.Struct, tag=True):
    """The downstream of an edge starts anew on `target`: send it everything retained, from the first chunk."""

    request_id: str
    source: str
    target: Peer


class Moved(msgspec.Struct, tag=True):
    """The upstream of an edge starts anew on `source`: expect its chunks, drop those of older attempts."""

    request_id: str
    source: Peer
    target: str


class Drop(msgspec.Struct, tag=True):
    """The request is over (finished, failed, cancelled): free everything held for it."""

    request_id: str


class PeerLost(msgspec.Struct, tag=True):
    """A worker died."""

    worker: str
    address: str


class LoadAdapter(msgspec.Struct, tag=True):
    """Read a LoRA adapter, so that requests can name it: answered with `AdapterLoaded`."""

    ticket: int
    """Goes back with the answer."""
    stage: str
    name: str
    directory: str


class UnloadAdapter(msgspec.Struct, tag=True):
    """Let no further request use it."""

    stage: str
    name: str


class Ping(msgspec.Struct, tag=True):
    """Answer with `Stats`: so that a worker that hangs is known from one that works."""


class Shutdown(msgspec.Struct, tag=True):
    """Leave now; the orchestrator has drained."""


# ── worker → orchestrator ──────────────────────────────────────────────────────────────────────────────────────────


class Loading(msgspec.Struct, tag=True):
    worker: str
    fraction: float
    what: str


class StageFacts(msgspec.Struct):
    """What only the loaded stage knows."""

    max_model_len: int | None = None
    vocab_size: int | None = None
    """Of an autoregressive stage: token ids are below it."""


class Ready(msgspec.Struct, tag=True):
    worker: str
    stages: dict[str, StageFacts]


class StartFailed(msgspec.Struct, tag=True):
    worker: str
    kind: str
    message: str


class OutputEnd(msgspec.Struct, frozen=True):
    """How one output of a stage ended."""

    index: int
    finish_reason: str
    cumulative_logprob: float | None = None
    stop_reason: int | str | None = None


class Emission(msgspec.Struct):
    """What one step of one stage made for one request, as far as the orchestrator cares."""

    request_id: str
    stage: str
    attempt: int
    index: int = 0
    """Which of the request's outputs this is about."""
    token_ids: list[int] = []
    """The journal: ids, never tensors."""
    first_index: int = 0
    deltas: list[ClientDelta] = []
    position: int = 0
    """Where the deltas start in the client stream of this output and attempt: characters, samples or pictures."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    modality_tokens: dict[str, int] = {}
    end: OutputEnd | None = None
    """In the last emission of one of several outputs."""


class Progress(msgspec.Struct, tag=True):
    """The emissions of one engine step."""

    worker: str
    emissions: list[Emission]


class InputDone(msgspec.Struct, tag=True):
    """`stage` has got the last chunk of `source`: the source's worker may die now without loss."""

    worker: str
    request_id: str
    stage: str
    attempt: int
    source: str


class InputLost(msgspec.Struct, tag=True):
    """A payload of `source` cannot be had any more (its producer died, or did not keep it): `stage` must start anew."""

    worker: str
    """Who says so: either end of the edge."""
    request_id: str
    stage: str
    attempt: int
    source: str


class StageDone(msgspec.Struct, tag=True):
    worker: str
    request_id: str
    stage: str
    attempt: int
    ends: list[OutputEnd]
    """Of every output, by index; one where the request asks for one."""
    began: float
    """time.monotonic(), one clock for all processes of a machine: when the stage heard of the request,"""
    started: float
    """when its first input was there,"""
    first: float
    """when it made its first output,"""
    ended: float
    """and its last."""


class Failed(msgspec.Struct, tag=True):
    """A stage could not serve a request; `kind` is the class name in `segue.messages.errors`."""

    worker: str
    request_id: str
    stage: str
    attempt: int
    kind: str
    message: str
    field: str | None = None


class AdapterLoaded(msgspec.Struct, tag=True):
    """How a `LoadAdapter` went."""

    worker: str
    ticket: int
    kind: str = ""
    """Empty where it is loaded; else the class name of the error."""
    message: str = ""


class Stats(msgspec.Struct, tag=True):
    worker: str
    stages: list[WorkerStats]


# ── worker → worker ────────────────────────────────────────────────────────────────────────────────────────────────


class Chunk(msgspec.Struct, tag=True):
    """One piece of an edge's stream."""

    request_id: str
    source: Peer
    target: str
    seq: int
    final: bool
    meta: dict[str, Any] | None
    """The connector's metadata; None: no payload (a final chunk may have none)."""
    nbytes: int
    sent: float
    """time.monotonic()"""


class Consumed(msgspec.Struct, tag=True):
    """The downstream has used chunks up to `seq`; their bytes no longer count against the edge's budget."""

    request_id: str
    source: str
    target: Peer
    seq: int
    finished: bool = False
    """The downstream stage is done with the request: retained payloads may go."""


ToWorker = Begin | Resend | Moved | Drop | PeerLost | LoadAdapter | UnloadAdapter | Ping | Shutdown | Chunk | Consumed
ToOrchestrator = (
    Loading | Ready | StartFailed | Progress | InputDone | InputLost | StageDone | Failed | Stats | AdapterLoaded
)

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_orchestrator = msgspec.msgpack.Decoder(ToOrchestrator)


def encode(message: ToWorker | ToOrchestrator) -> bytes:
    return _encoder.encode(message)


def decode_for_worker(data: bytes) -> ToWorker:
    return _to_worker.decode(data)


def decode_for_orchestrator(data: bytes) -> ToOrchestrator:
    return _to_orchestrator.decode(data)
