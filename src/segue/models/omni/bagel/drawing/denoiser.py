"""The denoiser: the decoder's generation experts over latents that follow contexts in the reader's cache.

It has no weights of its own: decoder, cache and the way in and out for latents are the `llm` stage's, in the same
worker. Rows of one call may differ in size, noise level and context: they are concatenated, and attend to their own
prefix and block.

n tokens of latents, P numbers in a token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import msgspec
import torch
from torch.nn import functional

from segue.engines.autoregressive.contexts.contract import LendsContexts, View
from segue.engines.contract import Payload, StageRequest
from segue.engines.diffusion.contract import DenoiserContext, Row, Sample
from segue.kernels.attention.prefix_attention import PrefixBlock, PrefixStep
from segue.messages.errors import StageFailed
from segue.models.omni.bagel.drawing.flow import guided, levels
from segue.models.omni.bagel.drawing.noise import noise_of_drawing
from segue.models.omni.bagel.drawing.settings import Drawing, Guidance
from segue.models.omni.bagel.llm import LLM
from segue.models.omni.bagel.prompt.prompts import experts_for
from segue.models.omni.bagel.vision import places, unpatched

READER = "llm"
_PREVIEW_SHRINK = 2
_ACTIVATIONS = 20
"""Approximate number of activations that a call holds at once, per token and per unit of the decoder's width."""
_TRIAL_SIDES = (128, 256, 512, 1024)
"""Height and width in pixels of the images on which calls are measured."""
_NOTHING = View(0, 0, 0)


class Flow:
    """A `Scheduler` of the diffusion engine: Euler's steps from one noise level to the next."""

    order = 1

    def __init__(self, count: int, shift: float) -> None:
        self._levels = levels(count, shift)
        self.timesteps = self._levels[:-1]
        self._done = 0

    def step(
        self, model_output: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor, **others: Any
    ) -> tuple[torch.Tensor]:
        """The latents at the next level, [1, n, P]."""
        self._done += 1
        width = float(timestep - self._levels[self._done])
        return (sample - width * model_output,)


@dataclass(slots=True)
class _State:
    """One request."""

    request: StageRequest
    lease: int | None = None
    """Of the blocks that it reads; None: it has none yet."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """`Sample.state`."""

    drawing: Drawing
    lease: int | None
    """None: its contexts are empty."""
    at: torch.Tensor
    """[n] long: places of the tokens."""
    branches: tuple[int, ...]
    """The branches of the whole, of no text and of no image, as far as they guide."""


class ImageDenoiser:
    """`DiffusionModel`. A sample's latents are [1, n, P] float32; its conditions are the different views of its
    request, the whole first."""

    weight_bytes = 0

    def __init__(self, ctx: DenoiserContext) -> None:
        self._llm = cast(LLM, ctx.same_worker.models[READER])
        self._contexts = cast(LendsContexts, ctx.same_worker.engines[READER])
        self._config = self._llm.config
        self.device = self._llm.device
        marks = torch.tensor([self._llm.marks.before, self._llm.marks.behind], device=self.device)
        with torch.inference_mode():
            self._marks = self._llm.embed_ids(marks)
        """[2, H]"""

    def warm_up(self) -> None:
        """Nothing: the engine's trials suffice."""

    def trials(self) -> Iterator[Sample]:
        largest = self._config.latent_side * self._config.token_pixels
        for side in dict.fromkeys(min(side, largest) for side in _TRIAL_SIDES):
            drawing = msgspec.structs.replace(_TRIAL, height=side, width=side)
            noise = torch.zeros(1, *self._shape(drawing))
            yield self._sample("trial", drawing, 0, noise, [_NOTHING], None)

    def row_bytes(self, sample: Sample) -> int:
        prefix = max((view.length for view in sample.conditions), default=0)
        width, tokens = self._config.llm.hidden_size, sample.tokens + prefix
        return _ACTIVATIONS * width * tokens * self._llm.dtype.itemsize

    def begin(self, request: StageRequest) -> _State:
        return _State(request)

    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> list[Sample]:
        """The reader's views and the settings → the samples."""
        if not payload:
            return []
        state.lease, views = payload["lease"], [View(*view) for view in payload["views"]]
        drawing = msgspec.convert(payload["drawing"], Drawing)
        shape = (drawing.count, *self._shape(drawing))
        noise, _ = noise_of_drawing(state.request, self._config.vae.z_channels, drawing, shape, state.request.visit)
        name = state.request.request_id
        return [
            self._sample(name, drawing, index, noise[index : index + 1], views, state.lease)
            for index in range(drawing.count)
        ]

    def branches(self, sample: Sample) -> Sequence[int]:
        drawn: _Drawn = sample.state
        if drawn.drawing.guidance.applies(float(sample.timestep)):
            return sorted(set(drawn.branches))
        return (0,)

    def bucket(self, sample: Sample) -> str:
        return str(sample.bucket)

    @torch.inference_mode()
    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """One call over rows of any sizes: their velocities [1, n, P] float32."""
        counts = [row.sample.tokens for row in rows]
        tokens = torch.cat([row.sample.latents[0] for row in rows]).to(self._llm.dtype)
        at = torch.cat([row.sample.state.at for row in rows])
        level = torch.stack([row.sample.timestep for row in rows]).to(self.device)
        image = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts)).to(self.device)
        latents = self._llm.space.rows(tokens, at, level, image).split(counts)
        ends = list(accumulate(count + 2 for count in counts))
        blocks = [
            PrefixBlock(end - count - 2, end, self._blocks(row), row.condition.length)
            for row, count, end in zip(rows, counts, ends, strict=True)
        ]
        flat = torch.cat([part for one in latents for part in (self._marks[:1], one, self._marks[1:])])
        spans = [(block.begin + 1, block.end - 1) for block in blocks]
        lengths = torch.tensor(counts) + 2
        positions = torch.tensor([row.condition.position for row in rows]).repeat_interleave(lengths)
        hidden = self._llm.forward_after(
            flat,
            positions.to(self.device),
            PrefixStep(self._contexts.store, blocks),
            experts_for(ends[-1], spans, self.device),
        )
        velocities = self._llm.space.velocity(torch.cat([hidden[first:last] for first, last in spans])).float()
        return [velocity[None] for velocity in velocities.split(counts)]

    def during(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        return nullcontext()

    def combine(self, sample: Sample, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        drawn: _Drawn = sample.state
        if not drawn.drawing.guidance.applies(float(sample.timestep)):
            return predictions[0]
        by_branch = dict(zip(sorted(set(drawn.branches)), predictions, strict=True))
        whole, without_text, *without_image = (by_branch[branch][0] for branch in drawn.branches)
        return guided(whole, without_text, without_image[0] if without_image else None, drawn.drawing.guidance)[None]

    def finish(self, sample: Sample) -> Payload:
        return {
            "latents": self._unpacked(sample, sample.latents),
            "index": sample.index,
            "latent_tokens": sample.tokens,
        }

    def preview(self, sample: Sample, prediction: torch.Tensor) -> Payload:
        latents = self._unpacked(sample, sample.latents - float(sample.timestep) * prediction)
        height, width = (max(1, side // _PREVIEW_SHRINK) for side in latents.shape[-2:])
        return {"latents": functional.adaptive_avg_pool2d(latents, (height, width)), "index": sample.index}

    def end(self, state: _State) -> None:
        """Give the contexts back."""
        if state.lease is not None:
            self._contexts.release(state.lease)

    def _sample(
        self,
        name: str,
        drawing: Drawing,
        index: int,
        noise: torch.Tensor,
        views: Sequence[View],
        lease: int | None,
    ) -> Sample:
        conditions = list(dict.fromkeys(views))
        flow = Flow(drawing.timesteps, drawing.shift)
        down, across = self._grid(drawing)
        drawn = _Drawn(
            drawing,
            lease,
            places(down, across, self._config.latent_side).to(self.device),
            tuple(conditions.index(view) for view in views),
        )
        return Sample(
            name,
            index,
            noise.to(self.device),
            flow,
            list(flow.timesteps),
            tokens=down * across,
            bucket="images",
            conditions=conditions,
            params=drawing.params,
            state=drawn,
        )

    def _blocks(self, row: Row) -> Sequence[int]:
        drawn: _Drawn = row.sample.state
        if drawn.lease is None:
            return ()
        try:
            return self._contexts.blocks(drawn.lease, row.condition)
        except KeyError as error:
            raise StageFailed("the contexts of this request were given back while its image was drawn") from error

    def _grid(self, drawing: Drawing) -> tuple[int, int]:
        pixels = self._config.token_pixels
        return drawing.height // pixels, drawing.width // pixels

    def _shape(self, drawing: Drawing) -> tuple[int, int]:
        down, across = self._grid(drawing)
        return down * across, self._config.token_channels

    def _unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        drawn: _Drawn = sample.state
        return unpatched(latents[0], self._config.latent_patch_size, *self._grid(drawn.drawing))[None]


_TRIAL = Drawing(
    height=0,
    width=0,
    timesteps=2,
    count=1,
    think=False,
    guidance=Guidance(text=1.0),
    shift=3.0,
    partial_images=0,
    given=(),
)
