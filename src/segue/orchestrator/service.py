"""What the server knows of the system behind it: the only door between HTTP and the stages."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec

from segue.messages.deltas import Delta
from segue.messages.request import Request
from segue.messages.speech import SpeechFacts
from segue.models.dialects.dialect import Dialect

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
    """`ready` when at least one replica is."""
    replicas: list[ReplicaHealth]


class Health(msgspec.Struct):
    ready: bool
    """Every stage has a ready replica."""
    stages: dict[str, StageHealth]


class ModelCard(msgspec.Struct):
    """What is served, for `/v1/models` and for checking requests at the door."""

    name: str
    family: str
    takes: frozenset[str]
    gives: frozenset[str]
    text_stage: str | None
    """The autoregressive stage that top-level sampling parameters go to."""
    sampling_stages: list[str]
    """The stages that `sampling` may name."""
    stages: list[str]
    voices: list[str]
    """The default first; empty where the model has none."""
    options: frozenset[str]
    """Request options of the family."""
    max_model_len: int | None
    created: int
    open_options: bool = False
    """Only the checkpoint's stages know which options there are (a pipeline's own arguments): all are taken."""
    several_texts: bool = False
    """One request for text alone may have several outputs: the text stage then feeds no other."""
    vocab_sizes: dict[str, int] = {}
    """By stage that samples, once it is loaded: token ids are below it."""
    root: str = ""
    """Where the checkpoint is."""
    adapters: dict[str, str] = {}
    """The LoRA adapters that a request may name: where they are."""
    speech: SpeechFacts | None = None
    """How it is asked, where it writes down what it hears."""
    dialect: Dialect = msgspec.field(default_factory=Dialect)
    """How its text is to be read."""


class Service(Protocol):
    """A running graph of stages."""

    card: ModelCard

    def health(self) -> Health: ...

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Deltas as they are made, `Finished` last; raises `SegueError`. Closing the generator cancels the request."""
        ...

    async def room(self) -> None:
        """Return when the queue is not full (any more): then `stream` need not be `Overloaded`, if nobody is faster."""
        ...

    async def load_lora(self, name: str, path: str) -> None:
        """Let requests name a LoRA adapter. Raises `InvalidRequest` where it cannot be."""
        ...

    async def unload_lora(self, name: str) -> None:
        """Let no further request name it; those that run go on. Raises `NotFound`."""
        ...

    def metrics(self) -> bytes:
        """Prometheus text exposition of everything, workers included."""
        ...
