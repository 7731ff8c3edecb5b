"""The server's interface to the system behind it: the only connection between HTTP and the stages."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec

from segue.messages.deltas import Delta
from segue.messages.limits import RequestLimits
from segue.messages.request import Appended, Request
from segue.messages.speech import SpeechFacts, TextToSpeech
from segue.messages.tensors import TensorSpec
from segue.models.shared.dialects.dialect import Dialect

ReplicaState = Literal["starting", "ready", "restarting", "draining", "failed"]


class ReplicaHealth(msgspec.Struct):
    """One worker of a stage. Fused stages share a pid."""

    pid: int | None
    state: ReplicaState
    restarts: int = 0
    loading: float = 0.0
    """Fraction of start-up done, 1.0 when ready."""


class StageHealth(msgspec.Struct):
    state: ReplicaState
    """`ready` if at least one replica is."""
    replicas: list[ReplicaHealth]


class MovedWorker(msgspec.Struct):
    """A worker that has moved from one stage to another."""

    from_stage: str
    to_stage: str
    worker: str
    """Its name there."""
    seconds: float
    """From the command until it was ready."""


class Health(msgspec.Struct):
    ready: bool
    """Whether every stage has a ready replica."""
    stages: dict[str, StageHealth]


class ModelCard(msgspec.Struct):
    """Facts about the served model, for `/v1/models` and for checking requests before admission."""

    name: str
    family: str
    takes: frozenset[str]
    gives: frozenset[str]
    text_stage: str | None
    """The autoregressive stage to which top-level sampling parameters apply."""
    sampling_stages: list[str]
    """The stages that `sampling` may name."""
    stages: list[str]
    voices: list[str] | None
    """The default first; empty if the model has none; None until its worker has reported them."""
    options: frozenset[str]
    """Request options of the family."""
    max_model_len: int | None
    created: int
    tensors: dict[str, TensorSpec] = {}
    """The named tensors that the model takes."""
    tokenizer: bool = True
    """False: the deployment loads none (`skip_tokenizer_init`); prompts and replies are token ids."""
    appends: bool = False
    """Whether input can be appended to a running request."""
    goes_on: bool = False
    """Whether a request can go on from an earlier one."""
    own_outputs: frozenset[str] = frozenset()
    """In a graph of models: outputs that a request may ask for by the model's name, e.g. `hear.text`."""
    open_options: bool = False
    """Accept all options: only the checkpoint's stages know them (a pipeline's own arguments)."""
    several_texts: bool = False
    """Whether a request for text alone may have several outputs: the text stage then feeds no other stage."""
    vocab_sizes: dict[str, int] = {}
    """Sampling stage → size of its vocabulary, known once it is loaded."""
    root: str = ""
    """Directory of the checkpoint."""
    adapters: dict[str, str] = {}
    """LoRA adapters that a request may name: name → directory."""
    by_priority: bool = False
    """Whether requests may have a priority, because some stage is scheduled by it."""
    speech: SpeechFacts | None = None
    """Facts for transcription requests, if the model transcribes speech."""
    says: TextToSpeech | None = None
    """How the model says a given text; None if it cannot."""
    limits: RequestLimits = msgspec.field(default_factory=RequestLimits)
    """Bounds on each request."""
    deadline: float | None = None
    """Seconds that an HTTP request without a deadline of its own may take."""
    dialect: Dialect = msgspec.field(default_factory=Dialect)
    """How to parse the model's text."""


class Service(Protocol):
    """A running graph of stages."""

    @property
    def card(self) -> ModelCard: ...

    def health(self) -> Health: ...

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Yield deltas, `Finished` last; raises `SegueError`. Closing the generator cancels the request."""
        ...

    def stream_appended(self, request: Request, pieces: AsyncGenerator[str | Appended]) -> AsyncGenerator[Delta]:
        """As `stream`, of an open request to which the pieces are appended as they come."""
        ...

    async def room(self) -> None:
        """Return as soon as the queue is not full: `stream` then succeeds unless another request is faster."""
        ...

    async def load_lora(self, name: str, path: str) -> None:
        """Load a LoRA adapter that requests can name. Raises `InvalidRequest` if it cannot be served."""
        ...

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter: running requests keep it, new ones cannot name it. Raises `NotFound`."""
        ...

    async def move_worker(self, from_stage: str, to_stage: str) -> MovedWorker:
        """Move a worker from one stage to another; return when it serves there. Raises `InvalidRequest` if none can
        move, `Overloaded` while another one moves, `StageLost` if it could not load the stage."""
        ...

    def metrics(self) -> bytes:
        """Return all metrics, including the workers', as Prometheus text."""
        ...
