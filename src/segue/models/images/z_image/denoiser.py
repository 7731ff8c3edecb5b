"""The denoiser: a single-stream transformer that accepts images and texts of any size in one call."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from segue.engines.diffusion.contract import DenoiserContext, Row, Sample
from segue.messages.diffusion import DiffusionParams
from segue.models.shared.diffusion.denoiser.denoiser import Denoiser
from segue.models.shared.diffusion.denoiser.given import Given
from segue.models.shared.diffusion.denoiser.schedulers import set_shifted
from segue.models.shared.diffusion.sizes import pixels_per_latent

_CLASSES = 8
"""Size classes per doubling of the number of tokens: rows of one class share a call, and smaller ones are padded by at
most a tenth."""


class ZImageDenoiser(Denoiser):
    """`DiffusionModel`. The network pads its rows itself and masks the padding."""

    noise_dtype = torch.float32

    def __init__(self, ctx: DenoiserContext) -> None:
        super().__init__(ctx)
        self._scale = pixels_per_latent(ctx.model_dir)

    def noise_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        assert params.height is not None
        assert params.width is not None
        return self.network.config.in_channels, params.height // self._scale, params.width // self._scale

    def tokens(self, latents: torch.Tensor) -> int:
        return latents.shape[-2] * latents.shape[-1] // 4

    def bucket_of(self, latents: torch.Tensor, given: Given, conditions: Sequence[Any]) -> Hashable:
        return math.ceil(_CLASSES * math.log2(self.tokens(latents)))

    def set_timesteps(self, scheduler: Any, latents: torch.Tensor, params: DiffusionParams) -> list[torch.Tensor]:
        return set_shifted(scheduler, params, self.tokens(latents), self.device)

    def begins_with(self, given: Given) -> dict[str, torch.Tensor] | None:
        return next(iter(given.images(self.device)), None)

    def other_tokens(self, sample: Sample) -> int:
        return max(map(len, sample.conditions))

    def conditions(self, given: Given) -> list[torch.Tensor]:
        """Prompt embeddings, [text tokens, hidden] each."""
        return [text["embeds"].to(self.dtype) for text in given.texts(self.device)]

    def trial_conditions(self, params: DiffusionParams) -> list[torch.Tensor]:
        return [torch.zeros(64, self.network.config.cap_feat_dim, dtype=self.dtype, device=self.device)]

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """The network's time runs from noise to image, and its prediction has the opposite sign of the scheduler's."""
        timesteps = torch.stack([row.sample.timestep for row in rows]).to(self.device)
        [predictions] = self.network(
            [row.sample.latents[0, :, None].to(self.dtype) for row in rows],
            (1000 - timesteps) / 1000,
            [row.condition for row in rows],
            return_dict=False,
        )
        return [-one[None, :, 0].float() for one in predictions]

    def combine(self, sample: Sample, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Guidance adds to the prompt's own prediction: a scale of 0 means none."""
        if len(predictions) == 1:
            return predictions[0]
        cond, uncond = predictions
        return cond + (sample.params.guidance_scale or 0.0) * (cond - uncond)

    def unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        return latents
