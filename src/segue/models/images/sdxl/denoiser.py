"""The denoiser: a UNet over latents, conditioned on both encoders' prompts and on the image's sizes."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DDPMScheduler, EDMDPMSolverMultistepScheduler, EDMEulerScheduler

from segue.engines.diffusion.contract import DenoiserContext, Row, Sample
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.shared.diffusion.denoiser.denoiser import Denoiser
from segue.models.shared.diffusion.denoiser.given import Given, Start
from segue.models.shared.diffusion.sizes import pixels_per_latent

SIZES = ("original_size", "crops_coords_top_left", "target_size")
"""The network's size conditions, in this order (Podell et al. 2023, section 2.2)."""


@dataclass(frozen=True, slots=True)
class Condition:
    """The conditions of one branch."""

    text: torch.Tensor
    """[1, tokens, hidden of both encoders]."""
    pooled: torch.Tensor
    """[1, dimension]."""
    sizes: torch.Tensor
    """[1, 6]: each of `SIZES` as two numbers, vertical and horizontal."""


class SdxlDenoiser(Denoiser):
    """`DiffusionModel`. Each sample's own scheduler scales the network's input."""

    component = "unet"

    def __init__(self, ctx: DenoiserContext) -> None:
        super().__init__(ctx)
        config = self.network.config
        if config.time_cond_proj_dim is not None:
            raise ConfigError("a guidance-distilled UNet (time_cond_proj_dim) is not served", field="model")
        self._scale = pixels_per_latent(ctx.model_dir)
        self._channels: int = config.in_channels
        self._alphas: torch.Tensor = DDPMScheduler.from_config(self.schedulers.config).alphas_cumprod

    def noise_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        assert params.height is not None
        assert params.width is not None
        return (self._channels, params.height // self._scale, params.width // self._scale)

    def begins_with(self, given: Given) -> dict[str, torch.Tensor] | None:
        return next(iter(given.images(self.device)), None)

    def conditions(self, given: Given) -> list[Condition]:
        first = given.texts(self.device)
        second = given.texts(self.device, "text_encoder_2")
        made = []
        for branch, (one, other) in enumerate(zip(first, second, strict=True)):
            text = torch.cat([one["embeds"], other["embeds"]], dim=-1).to(self.dtype)
            sizes = self._sizes(given, negative=branch == 1)
            made.append(Condition(text[None], other["pooled"][None].to(self.dtype), sizes))
        if len(made) == 1 and (given.params.guidance_scale or 0) > 1:  # the unconditional branch is zeros
            [only] = made
            sizes = self._sizes(given, negative=True)
            made.append(Condition(torch.zeros_like(only.text), torch.zeros_like(only.pooled), sizes))
        return made

    def trial_conditions(self, params: DiffusionParams) -> list[Condition]:
        config = self.network.config
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        shapes = ((1, 77, config.cross_attention_dim), (1, pooled), (1, 6))
        return [Condition(*(torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes))]

    def set_timesteps(self, scheduler: Any, latents: torch.Tensor, params: DiffusionParams) -> list[torch.Tensor]:
        if params.sigmas is not None and "sigmas" not in inspect.signature(scheduler.set_timesteps).parameters:
            raise InvalidRequest(f"sigmas: {type(scheduler).__name__} accepts none", field="sigmas")
        try:
            timesteps = list(super().set_timesteps(scheduler, latents, params))
        except ValueError as error:  # e.g. fewer steps than its order
            if params.sigmas is not None:
                raise InvalidRequest(
                    f"sigmas: {type(scheduler).__name__} refuses them: {error}", field="sigmas"
                ) from error
            raise InvalidRequest(
                f"num_inference_steps is {params.num_inference_steps}: {type(scheduler).__name__} refuses it: {error}",
                field="num_inference_steps",
            ) from error
        if not timesteps:  # the scheduler treats the last noise level as the end
            raise InvalidRequest(
                f"sigmas is {params.sigmas}: {type(scheduler).__name__} makes no step of them", field="sigmas"
            )
        begin = 0
        if params.strength is not None:
            steps = params.num_inference_steps or 1
            begin = (steps - int(steps * params.strength)) * scheduler.order
        if "set_begin_index" in dir(scheduler):  # some schedulers lack it
            scheduler.set_begin_index(begin)
        return timesteps[begin:]

    def started(self, latents: torch.Tensor, scheduler: Any, given: Given) -> torch.Tensor:
        return latents * scheduler.init_noise_sigma

    def started_from(
        self, start: Start, latents: torch.Tensor, scheduler: Any, first: torch.Tensor, given: Given
    ) -> torch.Tensor:
        # at full strength the repainted part begins with pure noise
        if start.mask is not None and given.params.strength == 1:
            return self.started(latents, scheduler, given)
        return super().started_from(start, latents, scheduler, first, given)

    def tokens(self, latents: torch.Tensor) -> int:
        return latents.shape[-2] * latents.shape[-1]

    def bucket_of(self, latents: torch.Tensor, given: Given, conditions: Sequence[Any]) -> Hashable:
        return tuple(latents.shape)

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        conditions: list[Condition] = [row.condition for row in rows]
        [predictions] = self.network(
            torch.cat([_seen(row.sample) for row in rows]),
            torch.stack([row.sample.timestep for row in rows]).to(self.device),
            encoder_hidden_states=torch.cat([condition.text for condition in conditions]),
            added_cond_kwargs={
                "text_embeds": torch.cat([condition.pooled for condition in conditions]),
                "time_ids": torch.cat([condition.sizes for condition in conditions]),
            },
            return_dict=False,
        )
        return predictions.split(1)

    def combine(self, sample: Sample, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Apply guidance; with `guidance_rescale`, rescale toward the standard deviation of the prompt's own prediction
        (Lin et al. 2023, section 3.4)."""
        _keep_pace(sample)
        guided = super().combine(sample, predictions)
        share = sample.params.guidance_rescale or 0.0
        if len(predictions) == 1 or not share:
            return guided
        return share * guided * (predictions[0].std() / guided.std()) + (1 - share) * guided

    def clean(self, sample: Sample, prediction: torch.Tensor) -> torch.Tensor:
        scheduler: Any = sample.scheduler
        if isinstance(scheduler, EDMEulerScheduler | EDMDPMSolverMultistepScheduler):
            return scheduler.precondition_outputs(sample.latents, prediction, scheduler.sigmas[scheduler.step_index])
        # the network's input is x = sqrt(a) x_0 + sqrt(1 - a) noise, whatever the scheduler works on
        alpha = self._alphas[int(sample.timestep)].to(prediction)
        kind = scheduler.config.prediction_type
        if kind == "sample":
            return prediction
        if kind == "v_prediction":
            return alpha.sqrt() * _seen(sample) - (1 - alpha).sqrt() * prediction
        return (_seen(sample) - (1 - alpha).sqrt() * prediction) / alpha.sqrt()

    def unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        return latents

    def _samples(self, given: Given, conditions: list[Any]) -> Iterator[Sample]:
        samples = list(super()._samples(given, conditions))
        for sample in samples:
            arguments = sample.step_arguments
            if given.params.eta is not None and "eta" in inspect.signature(sample.scheduler.step).parameters:
                arguments["eta"] = given.params.eta
        if len(samples) > 1 and "generator" in samples[0].step_arguments:
            behind_noise = samples[0].step_arguments["generator"].get_state()
            for sample in samples:
                sample.step_arguments["generator"] = torch.Generator().set_state(behind_noise)
        yield from samples

    def _sizes(self, given: Given, *, negative: bool) -> torch.Tensor:
        """The size conditions [1, 6]. The text-to-image pipeline uses negative sizes only if both are set."""
        params, image = given.params, "vae_encoder" in given.inputs
        size = (params.height or 0, params.width or 0)
        sizes = {
            "original_size": params.original_size or size,
            "crops_coords_top_left": params.crops_coords_top_left or (0, 0),
            "target_size": params.target_size or size,
        }
        others = params.negative_original_size, params.negative_target_size
        if negative and (image or None not in others):
            sizes["original_size"] = params.negative_original_size or sizes["original_size"]
            sizes["target_size"] = params.negative_target_size or sizes["target_size"]
            if not image:  # the image-to-image pipeline uses the same crop for both branches
                sizes["crops_coords_top_left"] = params.negative_crops_coords_top_left or (0, 0)
        values = [value for name in SIZES for value in sizes[name]]
        return torch.tensor([values], dtype=self.dtype, device=self.device)


def _seen(sample: Sample) -> torch.Tensor:
    """A sample's latents scaled for the network. Calling twice is harmless."""
    scheduler: Any = sample.scheduler
    return scheduler.scale_model_input(sample.latents, sample.timestep)


def _keep_pace(sample: Sample) -> None:
    """Before a step, advance a scheduler's generator to its state in the pipeline, which draws for all outputs of a
    request at once. The generator's state shows whether the last step drew. (A part of a draw equals that part of the
    whole if it is a multiple of 16 numbers; otherwise the noise differs, but is equally valid.)"""
    outputs = sample.params.num_images_per_prompt
    generator: torch.Generator | None = sample.step_arguments.get("generator")
    if outputs == 1 or generator is None:
        return
    skipped = 0
    if sample.step == 0:
        skipped = sample.index
    elif not torch.equal(generator.get_state(), sample.state):
        skipped = outputs - 1
    for _ in range(skipped):
        torch.randn(sample.latents.shape, generator=generator, dtype=sample.latents.dtype)
    sample.state = generator.get_state()
