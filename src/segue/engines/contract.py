"""The interface between a worker and an engine. Engines know no model, no connector, no process.

One `step` is one decode iteration, one denoising step or one batched module call; requests join and leave between
steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from segue.graph.deployment.options import LoraPlan
from segue.messages.errors import SegueError
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.messages.units import TurnEnd, Unit

Payload = dict[str, Any]
"""Nested dicts and lists of tensors, bytes, numbers, strings and None, which any connector can carry."""


@dataclass(slots=True)
class StageRequest:
    """One request at one stage. The worker makes it; it lives until the engine reports its end or it is cancelled."""

    request_id: str
    stage: str
    request: Request
    sampling: SamplingParams
    """As merged by `merged` of `segue.messages.sampling`."""
    seed: int
    upstreams: frozenset[str]
    """Stages whose chunks this one receives. The input stage has none: its payload is the request itself."""
    downstreams: frozenset[str]
    """Stages that receive this one's output; output without a receiver need not be captured."""
    to_client: frozenset[str]
    """Modalities of this stage's output that the client receives, e.g. {"text"}."""
    encoded: frozenset[str] = frozenset()
    """Those that the client receives as files, from the output stage."""
    resume: list[Unit] = field(default_factory=list)
    """Units that an earlier attempt had emitted: prefill them and continue. They are emitted downstream again."""
    resume_others: list[list[Unit]] = field(default_factory=list)
    """The same for outputs 1, 2, …, if the request asks for several."""
    turns: list[TurnEnd] = field(default_factory=list)
    """The turns of `resume` that had ended, if the input is open."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What a transfer keeps from one output of the request to the next, by a key of its own. A new attempt has none."""
    visit: int = 0
    """Which of the request's visits of the stage this is; of one that holds, the first."""
    returns: bool = False
    """A walk may return to the stage: after each visit, the request holds (`Holds`). `turns` are then the visits of
    `resume` that had ended."""
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)

    @property
    def outputs(self) -> int:
        """Number of outputs of the request; it is finished when all have ended."""
        return self.sampling.n or 1


@dataclass(slots=True)
class StageOutput:
    """New results of one step for one request. Engine kinds whose outputs have more extend it in their contract."""

    request_id: str
    index: int = 0
    """Index of the request's output among `n`; with several outputs, `finished` refers to this one."""
    payload: Payload | None = None
    """The result of one work item; a finished sample, or a preview of one."""
    progress: tuple[int, int] | None = None
    """(steps done, total steps) of sample `index`, of stages that denoise."""
    finished: bool = False
    turn_ended: bool = False
    """A turn or a visit has ended, and the request goes on when more input is appended (`Holds`)."""
    finish_reason: str = ""
    """When finished, or a turn has ended: `stop`, `length`, `repetition`."""
    error: SegueError | None = None
    """The request failed and was removed from this engine. Other requests are unaffected."""
    prompt_tokens: int = 0
    """All input tokens so far; in the first output of the request, and in the first after more input."""
    modality_tokens: dict[str, int] = field(default_factory=dict)
    """The same per modality."""


StageModel = Any
"""A stage model of the engine's kind, e.g. an `AutoregressiveModel`."""


@dataclass(slots=True)
class SameWorker:
    """The stages that share a worker. Each is built after those upstream of it, and may use what they have built."""

    stages: frozenset[str] = frozenset()
    """The names of all of them."""
    models: dict[str, StageModel] = field(default_factory=dict)
    """Stage → its stage model, once it is loaded."""
    engines: dict[str, Engine] = field(default_factory=dict)
    """Stage → its engine, once it is built."""


@dataclass(slots=True)
class LoadContext:
    """What every stage model is built from. Engine kinds whose stage models need more extend it in their contract."""

    model_dir: Path
    stage: str
    device: torch.device
    dtype: torch.dtype
    load_format: str = "auto"
    """`auto`: the checkpoint's weights; `dummy`: random weights of the config's shape, made on the device."""
    max_model_len: int | None = None
    lora: LoraPlan | None = None
    """None: the stage supports no adapters."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts and replies are token ids."""
    options: dict[str, Any] = field(default_factory=dict)
    """The deployment's own options for this stage, e.g. the vocoder's look-ahead."""
    progress: Callable[[float, str], None] = lambda fraction, what: None
    """Reports loading progress: the fraction done, and the current activity."""
    same_worker: SameWorker = field(default_factory=SameWorker)
    """The stages of its worker."""


StageModelFactory = Callable[[Any], StageModel]
"""Builds a stage model from the `LoadContext` of its engine's kind."""
Transfer = Callable[[StageRequest, Any], Payload | None]
"""Runs upstream for each output, of the type of its engine's kind: the payload for this edge, or None if the output has
nothing for it."""


@runtime_checkable
class HasVoices(Protocol):
    """A stage model with the voices that a request can name."""

    @property
    def voices(self) -> Sequence[str]:
        """Their names, the default first."""


class Engine(Protocol):
    """Runs one stage. Single-threaded: only the worker's loop calls it."""

    def warm_up(self) -> None:
        """Run the shapes of the first requests once in advance. Leaves no trace, not even in the stats."""

    def add(self, request: StageRequest) -> None:
        """Accept a request; its inputs arrive by `feed`. Raises `InvalidRequest` if it can never run."""

    def feed(self, request_id: str, upstream: str, payload: Payload, *, final: bool) -> None:
        """Take one chunk of an upstream's stream, in order. `final`: the last one. Unknown (cancelled) ids: ignored."""

    def cancel(self, request_id: str) -> None:
        """Drop the request and free its resources. Unknown ids are ignored."""

    def pause(self, request_id: str) -> None:
        """The downstream is full: stop scheduling this request; preempt it first when others need memory."""

    def resume(self, request_id: str) -> None:
        """Undo `pause`."""

    def backlog(self, request_id: str) -> int:
        """Number of the latest chunks that are still unused: bytes of all earlier ones no longer count against the
        edge's budget. A chunk kept only until the next arrives is not counted: the next could never be sent."""

    def has_work(self) -> bool:
        """True if `step` would do something now."""

    def step(self) -> Sequence[StageOutput]:
        """Run one batch. Never raises for the fault of one request: that request gets an output with `error`. Results
        that a device is still computing on return come out of the next call; until then there is work."""

    def stats(self) -> dict[str, float]:
        """Gauges for /metrics: `waiting`, `running`, `batch` (size of the last step), and the engine's own."""


@runtime_checkable
class Holds(Protocol):
    """An engine whose requests can be visited again (`StageRequest.returns`): what is fed is appended and only held."""

    def go_on(self, request_id: str) -> None:
        """All input of this visit has been fed: draw, until an output with `turn_ended`. Unknown ids are ignored."""

    def close(self, request_id: str) -> None:
        """There is no further visit: end the request with an output that is `finished`. Unknown ids are ignored."""
