"""Every control message that crosses a process, and the one codec for them (msgpack by msgspec).

    orchestrator → worker   Begin, Return, Close, Append, Throttle, Resend, Forgo, Moved, Abandon, Drop, PeerLost,
                            LoadAdapter, UnloadAdapter, Ping, Shutdown
    worker → orchestrator   Loading, Ready, StartFailed, Progress, InputDone, InputLost, Unreachable, Reachable,
                            StageDone, Failed, Stats, AdapterLoaded
    worker → worker         Chunk, Consumed

Payloads never travel here: a `Chunk` carries the connector's metadata. Every message about a request carries the
attempt of the stage that it is about; receivers drop messages of past attempts. Where a stage is visited again, the
messages about a later visit name it in place of the stage (`segue.graph.parts.visit_name`); all visits of a sequence
that holds go by the stage's name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from segue.messages.deltas import ClientDelta
from segue.messages.request import Appended, Request
from segue.messages.stats import WorkerStats
from segue.messages.units import TurnEnd, Unit


class Peer(msgspec.Struct, frozen=True):
    """One end of an edge: the stage, and the worker that runs it for this request."""

    stage: str
    worker: str
    """Unique per incarnation: a restarted worker has another name. Empty: it is not known yet if and where it runs."""
    address: str
    """The worker's inbox."""
    attempt: int


# ── orchestrator → worker ──────────────────────────────────────────────────────────────────────────────────────────


class Begin(msgspec.Struct, tag=True):
    """Run `stage` for a request. Only the input stage gets the request's `messages`."""

    request: Request
    stage: str
    attempt: int
    upstreams: list[Peer]
    downstreams: list[Peer]
    to_client: list[str]
    """Modalities of its output that the client gets from it."""
    encoded: list[str] = []
    """Modalities of its output that the client gets from the output stage, as files."""
    resume: list[list[Unit]] = []
    """For each output, the units that the journal holds from an earlier attempt."""
    turns: list[TurnEnd] = []
    """The turns among them that had ended, if the request is open; the visits that had, if it holds."""
    holds: bool = False
    """After each visit, hold the sequence until `Return` or `Close`."""
    served: list[str] = []
    """Downstream stages that get nothing of this visit, because they have it already or are not visited."""
    facts: bool = False
    """Report the facts of the output (`StageDone.facts`): the next visits depend on them."""


class Return(msgspec.Struct, tag=True):
    """The walk returns to a stage that holds: its next visit takes what `upstreams` send. Comes in the order of visits,
    to a new attempt again from the first."""

    request_id: str
    stage: str
    attempt: int
    upstreams: list[Peer]
    downstreams: list[Peer]


class Close(msgspec.Struct, tag=True):
    """The walk does not return to a stage that holds: its sequence ends after the visits so far."""

    request_id: str
    stage: str
    attempt: int


class Append(msgspec.Struct, tag=True):
    """More input for an open request. Sent to its input stage after `Begin`, to a new attempt again from the first."""

    request_id: str
    stage: str
    attempt: int
    piece: Appended | None
    """None: the input is closed."""


class Throttle(msgspec.Struct, tag=True):
    """The client of a request is behind: pause its stage. Or it has caught up: go on."""

    request_id: str
    stage: str
    attempt: int
    behind: bool


class Resend(msgspec.Struct, tag=True):
    """The downstream stage of an edge restarts on `target`: send it all retained chunks, from the first."""

    request_id: str
    source: str
    target: Peer


class Forgo(msgspec.Struct, tag=True):
    """What waits on an edge is not wanted: its condition does not hold."""

    request_id: str
    source: str
    target: str


class Moved(msgspec.Struct, tag=True):
    """The upstream stage of an edge restarts on `source`: expect its chunks, drop those of older attempts."""

    request_id: str
    source: Peer
    target: str


class Abandon(msgspec.Struct, tag=True):
    """A stage goes on in another worker: end the attempts up to this one, and free what they hold."""

    request_id: str
    stage: str
    attempt: int


class Drop(msgspec.Struct, tag=True):
    """The request is over (finished, failed, cancelled): free everything held for it."""

    request_id: str


class PeerLost(msgspec.Struct, tag=True):
    """A worker died."""

    worker: str
    address: str


class LoadAdapter(msgspec.Struct, tag=True):
    """Load a LoRA adapter, so that requests can name it; the worker answers with `AdapterLoaded`."""

    ticket: int
    """The answer repeats it."""
    stage: str
    name: str
    directory: str


class UnloadAdapter(msgspec.Struct, tag=True):
    """Unload a LoRA adapter: no further request may use it."""

    stage: str
    name: str


class Ping(msgspec.Struct, tag=True):
    """Ask for `Stats`; a worker that does not answer hangs."""


class Shutdown(msgspec.Struct, tag=True):
    """Exit now; the orchestrator has drained."""


# ── worker → orchestrator ──────────────────────────────────────────────────────────────────────────────────────────


class Loading(msgspec.Struct, tag=True):
    worker: str
    fraction: float
    what: str


class StageFacts(msgspec.Struct):
    """Facts that are known only once a stage is loaded."""

    max_model_len: int | None = None
    vocab_size: int | None = None
    """For an autoregressive stage: token ids are below it."""
    voices: list[str] = []
    """Of a stage that has the speakers of the checkpoint, the default first."""


class Ready(msgspec.Struct, tag=True):
    worker: str
    stages: dict[str, StageFacts]
    address: str
    """Of its inbox (`segue.messages.addresses`)."""


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
    """The output of one step of one stage for one request, as far as the orchestrator needs it."""

    request_id: str
    stage: str
    attempt: int
    index: int = 0
    """Which of the request's outputs this is about."""
    units: list[Unit] = []
    """New units for the journal (ids and rows of codes, never tensors)."""
    first_index: int = 0
    """Number of units generated before these."""
    turn: TurnEnd | None = None
    """Set if a turn of an open request ended with these units."""
    deltas: list[ClientDelta] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    modality_tokens: dict[str, int] = {}
    end: OutputEnd | None = None
    """Set in the last emission of one of several outputs."""


class Progress(msgspec.Struct, tag=True):
    """The emissions of one engine step."""

    worker: str
    emissions: list[Emission]


class InputDone(msgspec.Struct, tag=True):
    """`stage` has received the last chunk of `source`: the source's worker may die now without loss."""

    worker: str
    request_id: str
    stage: str
    attempt: int
    source: str


class InputLost(msgspec.Struct, tag=True):
    """A payload of `source` is lost (its producer died, or did not keep it): `stage` must restart."""

    worker: str
    """The reporting worker, at either end of the edge."""
    request_id: str
    stage: str
    attempt: int
    source: str


class Unreachable(msgspec.Struct, tag=True):
    """A worker's connection to another one was lost, and messages with it, or none could be made."""

    worker: str
    """The reporting worker."""
    address: str
    """The other's inbox."""


class Reachable(msgspec.Struct, tag=True):
    """The opposite of the last `Unreachable` with the same address."""

    worker: str
    address: str


class StageDone(msgspec.Struct, tag=True):
    worker: str
    request_id: str
    stage: str
    attempt: int
    ends: list[OutputEnd]
    """One per output of the request, by index."""
    began: float
    """When the stage received the request; all three times: seconds before this message, since hosts have other
    clocks."""
    started: float
    """When its first input arrived."""
    first: float
    """When it made its first output."""
    facts: dict[str, int | float | str | bool] = {}
    """Numbers, texts and truth values at the top of its last payload, if `Begin` asks for them."""


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
    """The result of a `LoadAdapter`."""

    worker: str
    ticket: int
    kind: str = ""
    """Empty on success; else the class name of the error."""
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
    target_attempt: int
    """Of the target, which it is for: one sent to the next attempt may come before the `Begin` of that."""
    seq: int
    final: bool
    meta: dict[str, Any] | None
    """The connector's metadata; None: no payload (a final chunk may have none)."""
    nbytes: int
    sent: float
    """time.monotonic() of the sender's host; on another host, the receiver puts the time of the arrival here."""


class Consumed(msgspec.Struct, tag=True):
    """The downstream stage has used chunks up to `seq`; their bytes no longer count against the edge's budget."""

    request_id: str
    source: str
    target: Peer
    seq: int
    finished: bool = False
    """The downstream stage is done with the request: retained payloads may be freed."""


ToWorker = (
    Begin
    | Return
    | Close
    | Append
    | Throttle
    | Resend
    | Forgo
    | Moved
    | Abandon
    | Drop
    | PeerLost
    | LoadAdapter
    | UnloadAdapter
    | Ping
    | Shutdown
    | Chunk
    | Consumed
)
ToOrchestrator = (
    Loading
    | Ready
    | StartFailed
    | Progress
    | InputDone
    | InputLost
    | Unreachable
    | Reachable
    | StageDone
    | Failed
    | Stats
    | AdapterLoaded
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
