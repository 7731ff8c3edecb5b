"""The denoiser: a transformer over text and image, with classifier-free guidance by a second row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.nn import functional

from segue.engines.diffusion.contract import DenoiserContext, Row, Sample
from segue.messages.diffusion import DiffusionParams
from segue.models.shared.diffusion.denoiser.denoiser import Denoiser
from segue.models.shared.diffusion.denoiser.given import Given, Start
from segue.models.shared.diffusion.denoiser.schedulers import after_strength, shifted
from segue.models.shared.diffusion.prompts import Condition, stacked
from segue.models.shared.diffusion.sizes import pixels_per_latent

_MAX_SHIFT = 1.16
"""The pipeline's default, if the scheduler's config sets none."""


class StableDiffusion3Denoiser(Denoiser):
    """`DiffusionModel`. The network has no text masks: the texts of a call's rows must have equal lengths."""

    def __init__(self, ctx: DenoiserContext) -> None:
        super().__init__(ctx)
        self._scale = pixels_per_latent(ctx.model_dir)

    def noise_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        assert params.height is not None
        assert params.width is not None
        return self.network.config.in_channels, params.height // self._scale, params.width // self._scale

    def tokens(self, latents: torch.Tensor) -> int:
        return latents.shape[-2] * latents.shape[-1] // int(self.network.config.patch_size) ** 2

    def bucket_of(self, latents: torch.Tensor, given: Given, conditions: Sequence[Condition]) -> Hashable:
        return tuple(latents.shape), len(conditions[0].text)

    def set_timesteps(self, scheduler: Any, latents: torch.Tensor, params: DiffusionParams) -> list[torch.Tensor]:
        more = {}
        if scheduler.config.get("use_dynamic_shifting"):
            more["mu"] = shifted({"max_shift": _MAX_SHIFT, **scheduler.config}, self.tokens(latents))
        if params.sigmas is not None:
            scheduler.set_timesteps(sigmas=params.sigmas, device=self.device, **more)
        else:
            scheduler.set_timesteps(params.num_inference_steps, device=self.device, **more)
        # close noise levels may have equal timesteps, which a search by timestep would confuse
        scheduler.set_begin_index(0)
        return after_strength(scheduler, params)

    def begins_with(self, given: Given) -> dict[str, torch.Tensor] | None:
        return next(iter(given.images(self.device)), None)

    def started_from(
        self, start: Start, latents: torch.Tensor, scheduler: Any, first: torch.Tensor, given: Given
    ) -> torch.Tensor:
        # at full strength the repainted part begins with pure noise
        if start.mask is not None and given.params.strength == 1:
            return latents
        return super().started_from(start, latents, scheduler, first, given)

    def other_tokens(self, sample: Sample) -> int:
        return max(len(one.text) for one in sample.conditions)

    def conditions(self, given: Given) -> list[Condition]:
        """CLIP's hidden states, zero-padded to T5's width, then T5's; zeros without T5."""
        clips = given.texts(self.device, "clip_encoder")
        width = self.network.config.joint_attention_dim
        if "t5_encoder" in given.inputs:
            long = [text["embeds"] for text in given.texts(self.device, "t5_encoder")]
        else:
            long = [torch.zeros(given.params.max_sequence_length or 256, width, device=self.device)] * len(clips)
        conditions = []
        for clip, t5 in zip(clips, long, strict=True):
            short = functional.pad(clip["embeds"], (0, width - clip["embeds"].shape[-1]))
            text = torch.cat([short.to(self.dtype), t5.to(self.dtype)])
            conditions.append(Condition(text, clip["pooled"].to(self.dtype)))
        return conditions

    def trial_conditions(self, params: DiffusionParams) -> list[Condition]:
        config = self.network.config
        text = torch.zeros(77 + 256, config.joint_attention_dim, dtype=self.dtype, device=self.device)
        return [Condition(text, text.new_zeros(config.pooled_projection_dim))]

    def trial_params(self) -> list[DiffusionParams]:
        """Trial sizes for which the network has positions."""
        config = self.network.config
        most = config.pos_embed_max_size * config.patch_size * self._scale
        return [params for params in super().trial_params() if (params.height or 0) <= most]

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        text, pooled = stacked([row.condition for row in rows])
        [predictions] = self.network(
            hidden_states=torch.cat([row.sample.latents for row in rows]),
            timestep=torch.stack([row.sample.timestep for row in rows]).to(self.device),
            encoder_hidden_states=text,
            pooled_projections=pooled,
            return_dict=False,
        )
        assert isinstance(predictions, torch.Tensor)
        return predictions.split(1)

    def unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        return latents
