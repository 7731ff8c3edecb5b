"""What a worker and an engine say to each other. Engines know no model, no connector, no process.

One `step` is one decode iteration, one denoising step or one batched module call; requests join and leave between
steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from segue.graph.lora import LoraPlan
from segue.messages.deltas import TokenLogprobs
from segue.messages.errors import SegueError
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.parallel.group import Group
from segue.parallel.ways import Ways

Payload = dict[str, Any]
"""Nested dicts and lists of tensors, bytes, numbers, strings and None: what a connector can carry."""


@dataclass(slots=True)
class StageRequest:
    """One request as one stage sees it. Made by the worker; lives until the engine says finished or it is cancelled."""

    request_id: str
    stage: str
    request: Request
    sampling: SamplingParams
    """Every field but `max_tokens` and `seed` is set: request over family defaults over the library's."""
    seed: int
    upstreams: frozenset[str]
    """Stages whose chunks this one will get. The input stage has none: its payload is the request itself."""
    downstreams: frozenset[str]
    """Stages that want this one's output; what nobody wants need not be captured."""
    to_client: frozenset[str]
    """Modalities of this stage's output that the client sees, e.g. {"text"}."""
    resume: list[int] = field(default_factory=list)
    """Token ids an earlier attempt had emitted: prefill them and go on. They are emitted to downstreams again."""
    resume_others: list[list[int]] = field(default_factory=list)
    """The same for outputs 1, 2, …, where the request asks for several."""
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)

    @property
    def outputs(self) -> int:
        """How many outputs the request gets; it is done when each has ended."""
        return self.sampling.n or 1


@dataclass(slots=True)
class Rows:
    """A piece of a per-token stream: `data[i]` belongs to position `start + i` of the request's sequence."""

    start: int
    data: torch.Tensor
    """[n, width]; on the engine's device."""


@dataclass(slots=True)
class StageOutput:
    """What one step made for one request. Only what is new."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    """Newly generated ids, end token included."""
    first_index: int = 0
    """How many ids the request had generated before these."""
    text: str = ""
    """New text, where the stage makes text for the client; held back while a stop string may be forming."""
    index: int = 0
    """Which of the request's `n` outputs this belongs to; `finished` with several outputs: this one is."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Beside `token_ids`, where the request asks for them; ids of an earlier attempt, which come first, have none."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """With the first token ever, where the request asks for them."""
    prompt_token_ids: list[int] = field(default_factory=list)
    """With the first token ever, where the request asks for them."""
    captured: Rows | None = None
    """Rows the adapter captured, of the tokens computed in this step (or found in the prefix cache)."""
    prompt: Any = None
    """Autoregressive: the request's `Prompt`, in the first output that carries captured rows; transfers may need it."""
    payload: Payload | None = None
    """Module: the result of one work item. Diffusion: a finished sample, or a preview of one."""
    progress: tuple[int, int] | None = None
    """Diffusion: (steps done, steps in all) of sample `index`."""
    finished: bool = False
    finish_reason: str = ""
    """`stop`, `length`, `repetition`."""
    stop_reason: int | str | None = None
    """When finished: the stop token or stop string of the request that ended it; None for the family's end token."""
    cumulative_logprob: float | None = None
    """When finished: sum over the tokens of the output, where the engine computed it."""
    error: SegueError | None = None
    """The request failed in this engine; it is gone from it. Other requests are untouched."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    modality_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens per modality, in the first output of the request."""


@dataclass(slots=True)
class LoadContext:
    """What an adapter gets to build itself with."""

    model_dir: Path
    stage: str
    device: torch.device
    dtype: torch.dtype
    load_format: str = "auto"
    """`auto`: the checkpoint's weights; `dummy`: random weights of the config's shape, made on the device."""
    max_model_len: int | None = None
    quantization: str = "none"
    """What the weights of linear layers are made into: one of `segue.graph.deployment.QUANTIZATIONS`."""
    gguf: dict[str, str] = field(default_factory=dict)
    """Of a denoiser: by network, the GGUF file that has its weights."""
    attention: str = "auto"
    """Of a denoiser: one of `segue.graph.deployment.DIFFUSION_ATTENTIONS`."""
    compile: bool = False
    """Of a denoiser: its blocks."""
    offload: str = "none"
    """Of a denoiser: one of `segue.graph.deployment.OFFLOADS`."""
    lora: LoraPlan | None = None
    """None: the stage takes no adapters."""
    fused: bool = True
    """Linear layers with the same input may be computed as one product."""
    recorded: bool = True
    """Calls of a denoiser may be recorded (on a GPU: as CUDA graphs)."""
    options: dict[str, Any] = field(default_factory=dict)
    """The deployment's own options for this stage, e.g. the vocoder's look-ahead."""
    progress: Callable[[float, str], None] = lambda fraction, what: None
    """Report loading: fraction done, and what is being done."""
    group: Group | None = None
    """Of a language model: the ranks among which the weights are divided; None: this process has them all."""
    ways: Ways | None = None
    """Of a denoiser: the ranks among which guidance branches, tokens and weights are divided; None: this process has
    them all."""
    sequence_ring: int = 1
    """Of a denoiser: of the ranks that share tokens, how many are in a ring; the others exchange heads."""

    @property
    def tensor_parallel(self) -> int:
        """Of a denoiser: ranks among which its weights are divided."""
        return 1 if self.ways is None else self.ways.shape.weights

    @property
    def sequence_parallel(self) -> int:
        """Of a denoiser: ranks among which the tokens of its rows are divided."""
        return 1 if self.ways is None else self.ways.shape.tokens


Adapter = Any
"""An adapter of the engine's kind: `AutoregressiveAdapter`, `ModuleAdapter`."""
AdapterFactory = Callable[[LoadContext], Adapter]
Transfer = Callable[[StageRequest, StageOutput], Payload | None]
"""Run upstream, per output: what leaves over this edge, or None when this output has nothing for it."""


class Engine(Protocol):
    """Runs one stage. Single-threaded: the worker's loop is the only caller."""

    def warm_up(self) -> None:
        """Run the shapes of the first requests once, before there is one. Leaves nothing behind, in stats neither."""

    def add(self, request: StageRequest) -> None:
        """Take a request; its inputs come by `feed`. Raises `InvalidRequest` when it can never run."""

    def feed(self, request_id: str, upstream: str, payload: Payload, *, final: bool) -> None:
        """One chunk of an upstream's stream, in order. `final`: the last one. Unknown ids are ignored (cancelled)."""

    def cancel(self, request_id: str) -> None:
        """Forget the request and free what it holds. Unknown ids are ignored."""

    def pause(self, request_id: str) -> None:
        """The downstream is full: do not schedule this request; preempt it first when others need room."""

    def resume(self, request_id: str) -> None:
        """Undo `pause`."""

    def backlog(self, request_id: str) -> int:
        """How many of the chunks fed last wait to be used: the bytes of those before them no longer count against the
        edge's budget. What is only kept until more arrives does not wait (its upstream must be able to send more)."""

    def has_work(self) -> bool:
        """True if `step` would do something now."""

    def step(self) -> list[StageOutput]:
        """Run one batch. Never raises for what one request did: that request gets an output with `error`. What a device
        is still computing when this returns comes out of the next call; until then there is work."""

    def stats(self) -> dict[str, float]:
        """Gauges for /metrics: `waiting`, `running`, `batch` (size of the last step), and the engine's own."""
