"""A denoiser: the network that predicts noise (or velocity), as the diffusion engine sees it."""

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

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.diffusion.contract import Row, Sample
from segue.kernels.quantized import packed_bytes
from segue.messages.diffusion import BLOCK_CACHES, FIRST_BLOCK, TAYLORSEER, TEACACHE, DiffusionParams
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.models.checkpoint import held_bytes
from segue.models.diffusion.block_cache import BlockCache, first_block
from segue.models.diffusion.given import Given
from segue.models.diffusion.loading import load_component, pipeline_class
from segue.models.diffusion.lora import DenoiserAdapters
from segue.models.diffusion.schedulers import Schedulers
from segue.models.diffusion.start import Start, keeper, noised
from segue.models.diffusion.teacache import OPTION as TEACACHE_OPTION
from segue.models.diffusion.teacache import given_coefficients, published, signal_of
from segue.models.diffusion.tuning import launched_one_by_one, load_network, recordings_bytes
from segue.models.lora import LINEARS, features, named_adapter

PREVIEW_SHRINK = 2
"""A preview has so many times fewer pixels in height and in width."""

ACTIVATIONS = 20
"""Numbers per token and width of the network that a call holds at once, about."""
CUT_ACTIVATIONS = 12
"""Of these, such as tensor parallel ranks have a part of: of the heads, and of the hidden layer."""


class Denoiser(ABC):
    """`DiffusionAdapter` over one network of diffusers.

    A family says: the shape of the noise (`noise_shape`), what a branch needs (`conditions`), one call (`predict`), and
    how latents look to the decoder (`unpacked`); and, where its pipeline differs, the rest.
    """

    component: ClassVar[str] = "transformer"
    noise_dtype: ClassVar[torch.dtype | None] = None
    """What the pipeline draws the noise in; None: what the network runs in."""
    read: ClassVar[frozenset[str]] = frozenset()
    """Linear layers whose weights the network looks at by itself."""

    def __init__(self, ctx: LoadContext) -> None:
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.network = load_network(ctx, self.component, self.read, self.load)
        self.schedulers = Schedulers(ctx.model_dir, across=True)
        self.weight_bytes = held_bytes(self.network) + packed_bytes(self.network) + recordings_bytes(self.network)
        self._compiled = ctx.compile
        self._sharing = None if ctx.ways is None else ctx.ways.network
        """The ranks that have a part of each call."""
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
        """Made for the first request that asks for it."""

    # ── what a family says ─────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def noise_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        """Of one output, as the pipeline draws it, without the dimension of the outputs."""

    @abstractmethod
    def conditions(self, given: Given) -> list[Any]:
        """By branch, the prompt's first; one alone where there is no guidance."""

    @abstractmethod
    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """One call of the network; see `DiffusionAdapter`."""

    @abstractmethod
    def unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        """Latents of a sample as the decoder takes them: [1, channels, (frames,) height, width]."""

    def load(self, ctx: LoadContext, component: str) -> nn.Module:
        """The network with its weights: the library's; one that no library has is read by `load_own`."""
        network: nn.Module = load_component(ctx, component)
        return network

    def draw(self, given: Given, generator: torch.Generator) -> torch.Tensor:
        """The noise of all outputs, drawn at once on the CPU: [outputs, …]."""
        shape = (given.params.num_images_per_prompt, *self.noise_shape(given.params))
        return torch.randn(shape, generator=generator, dtype=self.noise_dtype or self.dtype)

    def begins_with(self, given: Given) -> dict[str, torch.Tensor] | None:
        """The picture that the request begins with, encoded: `mean` and `std` of its latents, each of `noise_shape`;
        without `std` the mean is taken, and nothing drawn. None: it begins with noise alone."""
        return None

    def packed(self, noise: torch.Tensor, given: Given) -> torch.Tensor:
        """Noise of one output, [1, …], in the shape the scheduler works on."""
        return noise

    def set_timesteps(self, scheduler: Any, latents: torch.Tensor, params: DiffusionParams) -> Sequence[torch.Tensor]:
        """Prepare a scheduler; gives the timesteps of the calls."""
        if params.sigmas is not None:
            scheduler.set_timesteps(sigmas=params.sigmas, device=self.device)
        else:
            scheduler.set_timesteps(params.num_inference_steps, device=self.device)
        return list(scheduler.timesteps)

    def started(self, latents: torch.Tensor, scheduler: Any, given: Given) -> torch.Tensor:
        """Latents to start from, the timesteps being set, where there is no picture: e.g. scaled by
        `init_noise_sigma`."""
        return latents

    def started_from(
        self, start: Start, latents: torch.Tensor, scheduler: Any, first: torch.Tensor, given: Given
    ) -> torch.Tensor:
        """Latents to start from where there is a picture, `latents` being noise; `first`: the timestep of the first
        call."""
        return noised(scheduler, start.picture, latents, first)

    def tokens(self, latents: torch.Tensor) -> int:
        """Latent tokens of one row. By default the latents are [1, tokens, channels]."""
        return latents.shape[1]

    def tokens_beside(self, sample: Sample) -> int:
        """Tokens of one row that go through the same layers as its latents': of a text, or of pictures."""
        return 0

    def bucket_of(self, latents: torch.Tensor, given: Given, conditions: Sequence[Any]) -> Hashable:
        """What must be equal for rows to share a call. A picture and the same one turned have as many tokens."""
        return (tuple(latents.shape), given.params.height, given.params.width)

    def guidance(self, sample: Sample) -> float:
        """How much the prompt weighs over the negative prompt."""
        return sample.params.guidance_scale or 1.0

    def combine(self, sample: Sample, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Classifier-free guidance (Ho & Salimans 2022, eq. 6, in the form diffusers has it)."""
        if len(predictions) == 1:
            return predictions[0]
        cond, uncond = predictions
        return uncond + self.guidance(sample) * (cond - uncond)

    def clean(self, sample: Sample, prediction: torch.Tensor) -> torch.Tensor:
        """The latents without noise that a prediction points at. By default the network predicts the velocity of a
        rectified flow (Liu et al. 2022): x_0 = x_t - t v."""
        share = sample.timestep / self.schedulers.config.get("num_train_timesteps", 1000)
        return sample.latents - share.to(sample.latents) * prediction

    def told(self, sample: Sample) -> Payload:
        """What else the decoder should know, e.g. `fps`."""
        return {}

    def networks(self) -> Sequence[nn.Module]:
        """All that `predict` may call."""
        return [self.network]

    # ── DiffusionAdapter ───────────────────────────────────────────────────────────────────────────────────────────

    def trial_conditions(self, params: DiffusionParams) -> list[Any]:
        """The conditions of a made-up sample, the prompt's alone; none: there are no trials."""
        return []

    def trial_params(self) -> list[DiffusionParams]:
        """What made-up samples are of, the smallest first; with the defaults that the other hooks need."""
        sides = (128, 256, 512, 1024)
        return [DiffusionParams(height=side, width=side, num_inference_steps=2) for side in sides]

    def warm_up(self) -> None:
        """The engine's trials are enough, but for what is compiled at a first call."""
        if self._compiled and (sample := next(self.trials(), None)) is not None:
            for rows in self.compiled_calls(sample):
                self.predict(rows)

    def compiled_calls(self, sample: Sample) -> Iterator[list[Row]]:
        """Calls of a made-up sample, one for each version of the code that `predict` can come to: a row, several."""
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
        """Of a transformer, on this rank: what a layer holds at once for each token (its input and what it adds,
        queries, keys, values and their product, the hidden layer's four widths twice, norms)."""
        tokens = sample.tokens + self.tokens_beside(sample)
        cut = CUT_ACTIVATIONS * (1 - 1 / self._tensor_parallel)
        numbers = (ACTIVATIONS - cut) * self._width * tokens / self._sequence_parallel
        return round(numbers) * sample.latents.element_size()

    def begin(self, request: StageRequest) -> Given:
        """Raises `NotFound` for a LoRA adapter that is not there."""
        return Given(request, adapter=named_adapter(self.lora, request.request.adapter))

    def feed(self, state: Given, upstream: str, payload: Payload, *, final: bool) -> list[Sample]:
        if payload:  # the end of a stream may carry nothing
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
        """Raises `InvalidRequest` for a step cache that this network does not have."""
        if self._blocks is None:
            self._blocks = BlockCache(self.networks(), tea=self._tea, group=self._sharing)
        if name != TEACACHE:
            return
        block = first_block(self.network)
        assert block is not None
        signal_of(block)
        if self._tea is None:
            raise InvalidRequest(
                f"step_cache is {TEACACHE!r}, but none of its published polynomials is for this checkpoint; the option "
                f"{TEACACHE_OPTION} of the stage says one; without it there are {FIRST_BLOCK} and {TAYLORSEER}",
                field="step_cache",
            )
        if self._waits:
            raise InvalidRequest(
                f"step_cache is {TEACACHE!r}, which looks at the first block before its weights have come (offload); "
                f"there are {FIRST_BLOCK} and {TAYLORSEER}",
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
            **self.told(sample),
        }

    def preview(self, sample: Sample, prediction: torch.Tensor) -> Payload:
        latents = self.unpacked(sample, self.clean(sample, prediction))
        if latents.ndim == 5:  # of a video, its beginning
            latents = latents[:, :, :1]
        size = (max(1, latents.shape[-2] // PREVIEW_SHRINK), max(1, latents.shape[-1] // PREVIEW_SHRINK))
        flat = latents.reshape(-1, 1, *latents.shape[-2:])
        small = functional.adaptive_avg_pool2d(flat.float(), size).to(latents.dtype)
        return {"latents": small.reshape(*latents.shape[:-2], *size), "index": sample.index, **self.told(sample)}

    def end(self, state: Given) -> None:
        """Nothing is kept but the state itself."""

    def _samples(self, given: Given, conditions: list[Any]) -> Iterator[Sample]:
        generator = torch.Generator().manual_seed(given.request.seed)
        start = given.start = self._start(given, generator)
        noise = self.draw(given, generator)
        if start is not None and start.mask is not None:
            # the pipelines encode what is kept as well, for networks that see it, and draw of that too
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
        """Of the picture a request begins with, the latents are drawn first; all outputs begin with the same."""
        if (encoded := self.begins_with(given)) is None:
            return None
        mean = latents = encoded["mean"]
        if "std" in encoded:
            drawn = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(self.device)
            latents = mean + encoded["std"] * drawn
        dtype = self.noise_dtype or self.dtype
        picture = self.packed(latents[None].to(dtype), given)
        mask = given.mask
        if mask is None:
            return Start(picture, None)
        return Start(picture, self.packed(mask.to(self.device, dtype).expand(mean.shape)[None], given))

    def _step_arguments(self, scheduler: Any, generator: torch.Generator, seed: int, index: int) -> dict[str, Any]:
        """Schedulers that add noise draw output 0's where the pipeline would: behind the first noise. The others have a
        generator of their own, since they may be at other steps."""
        if "generator" not in inspect.signature(scheduler.step).parameters:
            return {}
        return {"generator": generator if index == 0 else torch.Generator().manual_seed(seed + index)}


def width_of(network: nn.Module) -> int:
    """The width that most weights of linear layers read; 0 where there are none."""
    counts: Counter[int] = Counter()
    for module in network.modules():
        if isinstance(module, LINEARS):
            inputs, outputs = features(module)
            counts[inputs] += inputs * outputs
    return counts.most_common(1)[0][0] if counts else 0
