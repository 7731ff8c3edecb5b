"""What the diffusion engine needs of a model: an adapter that turns conditions into samples, and rows into predictions.

One step of the engine is one call of the network over *rows* of many requests. A `Sample` is one picture or clip being
denoised: its latents, its own scheduler, the step it is at. At each step it has one row per guidance branch (with
classifier-free guidance: the prompt's and the negative prompt's). The engine chooses samples whose rows may share a
call, runs it, lets the adapter combine the branches of each sample, and advances each by its own scheduler.

    begin ─▶ feed* ─▶ [Sample, …]       conditions are here: latents drawn, timesteps set
    each step:  branches(sample)  ─▶ rows ─▶ predict(rows) ─▶ combine(sample, its predictions) ─▶ scheduler.step
    at the end: finish(sample)    ─▶ payload for the decoder
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from segue.engines.contract import Payload, StageRequest
from segue.messages.diffusion import DiffusionParams


class Scheduler(Protocol):
    """One of diffusers' schedulers; each sample has an instance of its own, with its timesteps set."""

    timesteps: torch.Tensor
    order: int

    def step(self, model_output: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor, **others: Any) -> Any:
        """The next latents, first in the tuple it returns with `return_dict=False`."""


@dataclass(slots=True)
class Sample:
    """One picture or clip on its way from noise to latents. Made by the adapter, advanced by the engine."""

    request_id: str
    index: int
    """Which of the request's outputs."""
    latents: torch.Tensor
    """In the shape the scheduler works on, batch dimension of 1 included; on the engine's device."""
    scheduler: Scheduler
    timesteps: Sequence[torch.Tensor]
    """One per call of the network: those of the scheduler (after `strength`)."""
    tokens: int
    """Latent tokens of one row: what its share of a call costs."""
    bucket: Hashable
    """Rows of equal bucket may share a call (the shape of the latents, mostly, and what else cannot be padded)."""
    conditions: list[Any]
    """By branch, the prompt's first: what the family's `predict` needs beside latents and timestep."""
    params: DiffusionParams
    """What the request asks, with the family's defaults filled in."""
    adapter: Any = None
    """What its request's LoRA adapter adds to the network, as the family has it: the same for all rows of a call, so it
    is in the bucket."""
    state: Any = None
    """The family's own."""
    given: int = 0
    """Of `tokens`, those of pictures that the request brings: as many whatever size is made."""
    step: int = 0
    """Calls of the network that are done; it is finished when this is `len(timesteps)`."""
    step_arguments: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments of `scheduler.step`: for those that add noise, a `generator` of the sample's own, so that
    the result depends on no neighbour."""
    step_cache: dict[Hashable, Any] = field(default_factory=dict)
    """What a step cache keeps of earlier calls."""
    mend: Callable[[Sample], torch.Tensor] | None = None
    """After each step of the scheduler: the latents to go on with, e.g. with what a mask keeps put back."""

    @property
    def timestep(self) -> torch.Tensor:
        """Of the next call, a scalar."""
        return self.timesteps[self.step]

    @property
    def remaining(self) -> int:
        """Calls of the network that are left."""
        return len(self.timesteps) - self.step


@dataclass(slots=True)
class Row:
    """One row of a call: a sample under one of its conditions."""

    sample: Sample
    branch: int
    """Place in `sample.conditions`."""

    @property
    def condition(self) -> Any:
        return self.sample.conditions[self.branch]


class DiffusionAdapter(Protocol):
    """A denoiser as the engine sees it."""

    weight_bytes: int
    """Memory of what does not change from request to request."""

    def warm_up(self) -> None:
        """Run what a first request would run, on something small. Leaves nothing behind that a request could see."""

    def trials(self) -> Iterator[Sample]:
        """Made-up samples, the smallest first, with which the engine measures calls before there is a request: of rows
        under their first condition. None: it learns from real calls."""

    def row_bytes(self, sample: Sample) -> int:
        """Memory that a call needs for one row of a sample, about; 0: unknown."""

    def begin(self, request: StageRequest) -> Any:
        """State of a request, until its samples are made."""

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> list[Sample]:
        """One chunk from upstream → the samples that became ready: all outputs of the request, when all is there.

        Raises `InvalidRequest` for that request alone.
        """

    def branches(self, sample: Sample) -> Sequence[int]:
        """The branches that the next step computes; a call's rows are these, for each of its samples."""

    def bucket(self, sample: Sample) -> Hashable:
        """What the next call of this sample may be shared with: `sample.bucket`, and e.g. which expert is next."""

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """One call of the network: what it predicts for each row, in the shape of the row's latents."""

    def during(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        """Around each `predict` of these rows: within it the network is theirs, with their LoRA adapter."""

    def combine(self, sample: Sample, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Guidance: the predictions of the sample's branches, in order of `branches` → what its scheduler steps by."""

    def finish(self, sample: Sample) -> Payload:
        """The denoised latents as they leave for the decoder, `index` (of the output) among them."""

    def preview(self, sample: Sample, prediction: torch.Tensor) -> Payload:
        """What the decoder makes a small picture of: the clean latents that a prediction points at, shrunk. Called
        before the scheduler has stepped; the engine adds `partial`, the number of the preview."""

    def end(self, state: Any) -> None:
        """The request left (finished, failed, cancelled): drop what is kept for it."""


@runtime_checkable
class CachesBlocks(Protocol):
    """An adapter of a network made of blocks, which can guess what they add."""

    def predict_behind_first(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """As `predict`, for samples whose `step_cache` is one of `BLOCK_CACHES`, all the same: of each row by itself it
        is decided which blocks are computed."""
