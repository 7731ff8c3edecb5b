"""The interface between the diffusion engine and a model. A stage model turns conditions into samples, and rows into
predictions.

One step of the engine is one call of the network over *rows* of many requests. A `Sample` is one image or clip being
denoised: its latents, its own scheduler, its current step. In each step it has one row per guidance branch (with
classifier-free guidance: the prompt's and the negative prompt's). The engine chooses samples whose rows may share a
call, runs it, lets the stage model combine the branches of each sample, and advances each by its own scheduler.

    begin ─▶ feed* ─▶ [Sample, …]       conditions have arrived: latents drawn, timesteps set
    each step:  branches(sample)  ─▶ rows ─▶ predict(rows) ─▶ combine(sample, its predictions) ─▶ scheduler.step
    at the end: finish(sample)    ─▶ payload for the decoder
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.messages.diffusion import DiffusionParams
from segue.parallel.ways import Ways


class Scheduler(Protocol):
    """A scheduler of diffusers; each sample has its own instance, with its timesteps set."""

    timesteps: torch.Tensor
    order: int

    def step(self, model_output: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor, **others: Any) -> Any:
        """Returns the next latents as the first element of a tuple if `return_dict=False`."""


@dataclass(slots=True)
class Sample:
    """One image or clip being denoised. The stage model makes it, the engine advances it."""

    request_id: str
    index: int
    """Index of the request's output."""
    latents: torch.Tensor
    """In the scheduler's shape, including a batch dimension of 1; on the engine's device."""
    scheduler: Scheduler
    timesteps: Sequence[torch.Tensor]
    """One per call of the network: the scheduler's (after `strength`)."""
    tokens: int
    """Latent tokens of one row, which determine its cost in a call."""
    bucket: Hashable
    """Rows of equal bucket may share a call (usually the shape of the latents and other inputs that are not padded)."""
    conditions: list[Any]
    """Per branch, the prompt's first: inputs of the family's `predict` besides latents and timestep."""
    params: DiffusionParams
    """The request's parameters, with the family's defaults filled in."""
    adapter: Any = None
    """The request's LoRA adapter in the family's representation: the same for all rows of a call, so it is part of the
    bucket."""
    state: Any = None
    """The family's own data."""
    given: int = 0
    """The part of `tokens` that comes from the request's input images, whatever the output size."""
    step: int = 0
    """Number of network calls done; the sample is finished when this is `len(timesteps)`."""
    step_arguments: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of `scheduler.step`: schedulers that add noise get a `generator` of the sample's own, so
    that the result is independent of its neighbours."""
    step_cache: dict[Hashable, Any] = field(default_factory=dict)
    """Data that a step cache keeps from earlier calls."""
    mend: Callable[[Sample], torch.Tensor] | None = None
    """Called after each scheduler step; returns the latents to continue with, e.g. with masked parts restored."""

    @property
    def timestep(self) -> torch.Tensor:
        """Timestep of the next call, a scalar."""
        return self.timesteps[self.step]

    @property
    def remaining(self) -> int:
        """Number of network calls left."""
        return len(self.timesteps) - self.step


@dataclass(slots=True)
class Row:
    """One row of a call: a sample with one of its conditions."""

    sample: Sample
    branch: int
    """Index in `sample.conditions`."""

    @property
    def condition(self) -> Any:
        return self.sample.conditions[self.branch]


class DiffusionModel(Protocol):
    """A denoiser as the engine sees it."""

    weight_bytes: int
    """Memory of data that does not change between requests."""

    def warm_up(self) -> None:
        """Run a small example of a first request. Leaves no state that a request could see."""

    def trials(self) -> Iterator[Sample]:
        """Made-up samples, the smallest first, with which the engine measures calls before the first request, with rows
        of their first condition. Empty: the engine learns from real calls."""

    def row_bytes(self, sample: Sample) -> int:
        """Approximate memory that a call needs for one row of a sample; 0: unknown."""

    def begin(self, request: StageRequest) -> Any:
        """State of a request until its samples are made."""

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> list[Sample]:
        """One chunk from upstream → the samples that became ready: all outputs, when all inputs have arrived.

        Raises `InvalidRequest` for that request alone.
        """

    def branches(self, sample: Sample) -> Sequence[int]:
        """The branches that the next step computes; each of them is a row of the call."""

    def bucket(self, sample: Sample) -> Hashable:
        """Samples of equal buckets may share their next call: `sample.bucket`, and e.g. the next expert."""

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """One call of the network: the prediction for each row, in the shape of the row's latents."""

    def during(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        """Context of each `predict` of these rows; applies their LoRA adapter to the network."""

    def combine(self, sample: Sample, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Apply guidance: the predictions of the sample's branches, in order of `branches` → the scheduler's input."""

    def finish(self, sample: Sample) -> Payload:
        """The payload for the decoder: the denoised latents and `index` (of the output)."""

    def preview(self, sample: Sample, prediction: torch.Tensor) -> Payload:
        """The decoder's input for a small preview image: the clean latents that a prediction implies, downscaled. It is
        called before the scheduler steps; the engine adds `partial`, the number of the preview."""

    def end(self, state: Any) -> None:
        """The request ended (finished, failed, cancelled): drop its state."""


@runtime_checkable
class CachesBlocks(Protocol):
    """A stage model whose network consists of blocks, and which can predict their outputs from earlier calls."""

    def predict_behind_first(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """Like `predict`, for samples that all have the same `step_cache` of `BLOCK_CACHES`; which blocks are computed
        is decided separately for each row."""


@dataclass(slots=True)
class DenoiserContext(LoadContext):
    """What the stage model of a denoiser is built from."""

    quantization: str = "none"
    """Target format of the weights of linear layers: one of `segue.graph.deployment.options.QUANTIZATIONS`."""
    gguf: dict[str, str] = field(default_factory=dict)
    """Network → the GGUF file with its weights."""
    attention: str = "auto"
    """One of `segue.graph.kinds.diffusion.ATTENTIONS`."""
    compile: bool = False
    """Compile its blocks."""
    offload: str = "none"
    """One of `segue.graph.kinds.diffusion.OFFLOADS`."""
    fused: bool = True
    """Linear layers with the same input may be fused into one GEMM."""
    recorded: bool = True
    """Calls may be recorded (on a GPU: as CUDA graphs)."""
    ways: Ways | None = None
    """The ranks that share guidance branches, tokens and weights; None: this process has them all."""
    sequence_ring: int = 1
    """Ring size among the ranks that share tokens; across rings, ranks exchange heads."""

    @property
    def tensor_parallel(self) -> int:
        """Number of ranks that share its weights."""
        return 1 if self.ways is None else self.ways.shape.weights

    @property
    def sequence_parallel(self) -> int:
        """Number of ranks that share the tokens of its rows."""
        return 1 if self.ways is None else self.ways.shape.tokens
