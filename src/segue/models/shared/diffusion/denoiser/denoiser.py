"""The denoiser's stage model: runs the network that predicts noise (or velocity) for the diffusion engine."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import msgspec
import torch
from torch import nn
from torch.nn import functional

from segue.engines.contract import Payload, StageRequest
from segue.engines.diffusion.contract import DenoiserContext, Row, Sample
from segue.kernels.graphs.replay import launched_one_by_one
from segue.kernels.prepare import prepared_bytes
from segue.messages.diffusion import BLOCK_CACHES, FIRST_BLOCK, TAYLORSEER, TEACACHE, DiffusionParams
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.diffusion.denoiser.block_cache import BlockCache, first_block
from segue.models.shared.diffusion.denoiser.given import Given, Start, keeper, noised
from segue.models.shared.diffusion.denoiser.lora import DenoiserAdapters
from segue.models.shared.diffusion.denoiser.schedulers import Schedulers
from segue.models.shared.diffusion.denoiser.teacache import OPTION as TEACACHE_OPTION
from segue.models.shared.diffusion.denoiser.teacache import given_coefficients, published, signal_of
from segue.models.shared.diffusion.denoiser.tuning import load_network
from segue.models.shared.diffusion.loading import load_component, pipeline_class
from segue.models.shared.lora import LINEARS, features, named_adapter

PREVIEW_SHRINK = 2
"""Factor by which a preview is smaller in height and in width."""

ACTIVATIONS = 20
"""Approximate number of activations that a call holds at once, per token and per unit of the network's width."""
CUT_ACTIVATIONS = 12
"""The share of these that tensor parallelism divides: activations of the heads and of the hidden layer."""


class Denoiser(ABC):
    """`DiffusionModel` over one network of diffusers.

    A family defines the shape of the noise (`noise_shape`), the inputs of a branch (`conditions`), one call (`predict`)
    and the decoder's layout of latents (`unpacked`); and overrides the rest where its pipeline differs.
    """

    component: ClassVar[str] = "transformer"
    noise_dtype: ClassVar[torch.dtype | None] = None
    """The dtype in which the pipeline draws the noise; None: the network's."""
    read: ClassVar[frozenset[str]] = frozenset()
    """Linear layers whose weights the network reads directly."""

    def __init__(self, ctx: DenoiserContext) -> None:
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.network = load_network(ctx, self.component, self.read, self.load)
        self.schedulers = Schedulers(ctx.model_dir, across=True)
        self.weight_bytes = held_bytes(self.network) + prepared_bytes(self.network)
        self._compiled = ctx.compile
        self._sharing = None if ctx.ways is None else ctx.ways.network
        """The ranks that share each call."""
        self._tensor_parallel, self._sequence_parallel = ctx.tensor_parallel, ctx.sequence_parallel
        self._waits = ctx.offload != "none"
        self._tea = given_coefficients(ctx) or published(ctx, self.network)
        self._width = width_of(self.network)
        self.lora: DenoiserAdapters | None = None
        if ctx.lora is not None:
            pipeline = pipeline_class(ctx.model_dir)
            self.lora = DenoiserAdapters(self.network, pipeline, self.component, ctx.lora, ctx.device, ctx.dtype)
            self.weight_bytes += self.lora.reserved_bytes(ctx.dtype)
        self._blocks: BlockCache | None = None
        """Created for the first request that uses it."""

    # ── hooks that a family implements or overrides ───────────────────────────────────────────────────────────────────

    @abstractmethod
    def noise_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        """Shape of one output's noise as the pipeline draws it, without the batch dimension."""

    @abstractmethod
    def conditions(self, given: Given) -> list[Any]:
        """Conditions per guidance branch, the prompt's first; a single one without guidance."""

    @abstractmethod
    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """Run one call of the network; see `DiffusionModel`."""

    @abstractmethod
    def unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        """A sample's latents in the decoder's layout: [1, channels, (frames,) height, width]."""

    def load(self, ctx: DenoiserContext, component: str) -> nn.Module:
        """Load the network: the library's; a family whose network is in no library uses `load_own`."""
        network: nn.Module = load_component(ctx, component)
        return network

    def draw(self, given: Given, generator: torch.Generator) -> torch.Tensor:
        """The noise of all outputs, drawn at once on the CPU: [outputs, …]."""
        shape = (given.params.num_images_per_prompt, *self.noise_shape(given.params))
        return torch.randn(shape, generator=generator, dtype=self.noise_dtype or self.dtype)

    def begins_with(self, given: Given) -> dict[str, torch.Tensor] | None:
        """The encoded input image: `mean` and `std` of its latents, each of `noise_shape`; without `std` the latents
        are the mean, and nothing is drawn. None: the request begins with noise alone."""
        return None

    def packed(self, noise: torch.Tensor, given: Given) -> torch.Tensor:
        """Noise of one output, [1, …], in the layout that the scheduler works on."""
        return noise

    def set_timesteps(self, scheduler: Any, latents: torch.Tensor, params: DiffusionParams) -> Sequence[torch.Tensor]:
        """Set a scheduler's timesteps; returns those of the calls."""
        if params.sigmas is not None:
            scheduler.set_timesteps(sigmas=params.sigmas, device=self.device)
        else:
            scheduler.set_timesteps(params.num_inference_steps, device=self.device)
        return list(scheduler.timesteps)

    def started(self, latents: torch.Tensor, scheduler: Any, given: Given) -> torch.Tensor:
        """Initial latents without an input image, after the timesteps are set: e.g. scaled by `init_noise_sigma`."""
        return latents

    def started_from(
        self, start: Start, latents: torch.Tensor, scheduler: Any, first: torch.Tensor, given: Given
    ) -> torch.Tensor:
        """Initial latents with an input image; `latents`: noise, `first`: the timestep of the first call."""
        return noised(scheduler, start.image, latents, first)

    def tokens(self, latents: torch.Tensor) -> int:
        """Latent tokens of one row. By default the latents are [1, tokens, channels]."""
        return latents.shape[1]

    def other_tokens(self, sample: Sample) -> int:
        """Further tokens of one row that pass through the same layers as its latents': of a text, or of images."""
        return 0

    def bucket_of(self, latents: torch.Tensor, given: Given, conditions: Sequence[Any]) -> Hashable:
        """The key that rows of one call must share. Token counts are not enough: a transposed image has as many."""
        return (tuple(latents.shape), given.params.height, given.params.width)

    def guidance(self, sample: Sample) -> float:
        """The guidance scale: weight of the prompt over the negative prompt."""
        return sample.params.guidance_scale or 1.0

    def combine(self, sample: Sample, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Classifier-free guidance (Ho & Salimans 2022, eq. 6, in the form diffusers has it)."""
        if len(predictions) == 1:
            return predictions[0]
        cond, uncond = predictions
        return uncond + self.guidance(sample) * (cond - uncond)

    def clean(self, sample: Sample, prediction: torch.Tensor) -> torch.Tensor:
        """The noise-free latents that a prediction implies. By default the network predicts the velocity of a rectified
        flow (Liu et al. 2022): x_0 = x_t - t v."""
        share = sample.timestep / self.schedulers.config.get("num_train_timesteps", 1000)
        return sample.latents - share.to(sample.latents) * prediction

    def decoder_values(self, sample: Sample) -> Payload:
        """Further values for the decoder, e.g. `fps`."""
        return {}

    def networks(self) -> Sequence[nn.Module]:
        """All networks that `predict` may call."""
        return [self.network]

    # ── DiffusionModel ────────────────────────────────────────────────────────────────────────────────────────────────

    def trial_conditions(self, params: DiffusionParams) -> list[Any]:
        """The conditions of a trial sample, the prompt's alone; empty: no trials."""
        return []

    def trial_params(self) -> list[DiffusionParams]:
        """Parameters of the trial samples, the smallest first, with the defaults that the other hooks need."""
        sides = (128, 256, 512, 1024)
        return [DiffusionParams(height=side, width=side, num_inference_steps=2) for side in sides]

    def warm_up(self) -> None:
        """Run the calls that compile code; otherwise the engine's trials suffice."""
        if self._compiled and (sample := next(self.trials(), None)) is not None:
            for rows in self.compiled_calls(sample):
                self.predict(rows)

    def compiled_calls(self, sample: Sample) -> Iterator[list[Row]]:
        """Calls of a trial sample, one for each compiled variant of `predict`: one row, and several."""
        yield [Row(sample, 0)]
        yield [Row(sample, 0)] * 2

    def trials(self) -> Iterator[Sample]:
        made_up = StageRequest(
            request_id="trial",
            stage="",
            request=Request(request_id="trial", prompt=""),
            sampling=SamplingParams(),
            seed=0,
            upstreams=frozenset(),
            downstreams=frozenset(),
            to_client=frozenset(),
        )
        for params in self.trial_params():
            given = Given(made_up, params=params)
            if conditions := self.trial_conditions(params):
                yield from self._samples(given, conditions)

    def row_bytes(self, sample: Sample) -> int:
        """Bytes per row of a transformer on this rank: a layer's activations for each token (its input and residual,
        queries, keys, values and the attention output, the hidden layer's four widths twice, norms)."""
        tokens = sample.tokens + self.other_tokens(sample)
        cut = CUT_ACTIVATIONS * (1 - 1 / self._tensor_parallel)
        numbers = (ACTIVATIONS - cut) * self._width * tokens / self._sequence_parallel
        return round(numbers) * sample.latents.element_size()

    def begin(self, request: StageRequest) -> Given:
        """Raises `NotFound` for an unknown LoRA adapter."""
        return Given(request, adapter=named_adapter(self.lora, request.request.adapter))

    def feed(self, state: Given, upstream: str, payload: Payload, *, final: bool) -> list[Sample]:
        if payload:  # a stream may end with an empty chunk
            state.inputs.setdefault(upstream, []).append(payload)
        if final:
            state.final.add(upstream)
        if state.final != state.request.upstreams:
            return []
        [settings] = state.inputs["input"]
        state.params = msgspec.convert(settings["settings"], DiffusionParams)
        if state.params.step_cache in BLOCK_CACHES:
            self._check_cache(state.params.step_cache)
        return list(self._samples(state, self.conditions(state)))

    def _check_cache(self, name: str) -> None:
        """Raises `InvalidRequest` for a step cache that this network does not support."""
        if self._blocks is None:
            self._blocks = BlockCache(self.networks(), tea=self._tea, group=self._sharing)
        if name != TEACACHE:
            return
        block = first_block(self.network)
        assert block is not None
        signal_of(block)
        if self._tea is None:
            raise InvalidRequest(
                f"step_cache is {TEACACHE!r}, but it has no published polynomial for this checkpoint; the option "
                f"{TEACACHE_OPTION} of the stage sets one; without it this model has {FIRST_BLOCK} and {TAYLORSEER}",
                field="step_cache",
            )
        if self._waits:
            raise InvalidRequest(
                f"step_cache is {TEACACHE!r}, which reads the first block before its weights are loaded (offload); "
                f"this model has {FIRST_BLOCK} and {TAYLORSEER}",
                field="step_cache",
            )

    def predict_behind_first(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        assert self._blocks is not None
        with launched_one_by_one(self.networks()):
            return self._blocks.predict(rows, self.predict, self.bucket(rows[0].sample))

    def branches(self, sample: Sample) -> Sequence[int]:
        everything = range(len(sample.conditions))
        if sample.params.guidance_interval is None:
            return everything
        begin, end = sample.params.guidance_interval
        return everything if begin <= sample.step / len(sample.timesteps) < end else (0,)

    def bucket(self, sample: Sample) -> Hashable:
        return sample.bucket

    def during(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        return nullcontext() if self.lora is None else self.lora.during(rows)

    def finish(self, sample: Sample) -> Payload:
        return {
            "latents": self.unpacked(sample, sample.latents),
            "index": sample.index,
            "latent_tokens": self.tokens(sample.latents),
            **self.decoder_values(sample),
        }

    def preview(self, sample: Sample, prediction: torch.Tensor) -> Payload:
        latents = self.unpacked(sample, self.clean(sample, prediction))
        if latents.ndim == 5:  # of a video, preview the first frame
            latents = latents[:, :, :1]
        size = (max(1, latents.shape[-2] // PREVIEW_SHRINK), max(1, latents.shape[-1] // PREVIEW_SHRINK))
        flat = latents.reshape(-1, 1, *latents.shape[-2:])
        small = functional.adaptive_avg_pool2d(flat.float(), size).to(latents.dtype)
        return {
            "latents": small.reshape(*latents.shape[:-2], *size),
            "index": sample.index,
            **self.decoder_values(sample),
        }

    def end(self, state: Given) -> None:
        """Nothing to free: only the state itself is kept."""

    def _samples(self, given: Given, conditions: list[Any]) -> Iterator[Sample]:
        generator = torch.Generator().manual_seed(given.request.seed)
        start = given.start = self._start(given, generator)
        noise = self.draw(given, generator)
        if start is not None and start.mask is not None:
            # the pipelines also encode the masked image, for networks that see it, and draw noise for it
            torch.randn(noise[:1].shape, generator=generator, dtype=noise.dtype)
        for index in range(given.params.num_images_per_prompt):
            scheduler = self.schedulers.make(given.params.scheduler)
            latents = self.packed(noise[index : index + 1].to(self.device), given)
            timesteps = self.set_timesteps(scheduler, latents, given.params)
            bucket = self.bucket_of(latents, given, conditions)
            begun = (
                self.started(latents, scheduler, given)
                if start is None
                else self.started_from(start, latents, scheduler, timesteps[0], given)
            )
            yield Sample(
                given.request.request_id,
                index,
                begun,
                scheduler,
                timesteps,
                tokens=self.tokens(latents),
                bucket=bucket if given.adapter is None else (bucket, given.adapter.identity),
                conditions=conditions,
                params=given.params,
                adapter=given.adapter,
                step_arguments=self._step_arguments(scheduler, generator, given.request.seed, index),
                mend=None if start is None else keeper(start, latents),
            )

    def _start(self, given: Given, generator: torch.Generator) -> Start | None:
        """The input image's latents. They are drawn before the noise, and all outputs begin with the same."""
        if (encoded := self.begins_with(given)) is None:
            return None
        mean = latents = encoded["mean"]
        if "std" in encoded:
            drawn = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(self.device)
            latents = mean + encoded["std"] * drawn
        dtype = self.noise_dtype or self.dtype
        image = self.packed(latents[None].to(dtype), given)
        mask = given.mask
        if mask is None:
            return Start(image, None)
        return Start(image, self.packed(mask.to(self.device, dtype).expand(mean.shape)[None], given))

    def _step_arguments(self, scheduler: Any, generator: torch.Generator, seed: int, index: int) -> dict[str, Any]:
        """Generators of schedulers that add noise: output 0 draws after the initial noise, as in the pipeline. The
        others have generators of their own, since they may be at other steps."""
        if "generator" not in inspect.signature(scheduler.step).parameters:
            return {}
        return {"generator": generator if index == 0 else torch.Generator().manual_seed(seed + index)}


def embedded_guidance(rows: Sequence[Row]) -> torch.Tensor:
    """[rows] float32: the guidance scale as an input of a distilled network. Filled on the device: a copy from the host
    would synchronise in every step."""
    return torch.stack(
        [row.sample.latents.new_full((), row.sample.params.guidance_scale or 0.0, dtype=torch.float32) for row in rows]
    )


def width_of(network: nn.Module) -> int:
    """The input width of most linear weights; 0 if there are none."""
    counts: Counter[int] = Counter()
    for module in network.modules():
        if isinstance(module, LINEARS):
            inputs, outputs = features(module)
            counts[inputs] += inputs * outputs
    return counts.most_common(1)[0][0] if counts else 0
