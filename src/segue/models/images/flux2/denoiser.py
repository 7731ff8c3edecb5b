"""The denoiser: a transformer over text and image tokens, first in two streams, then in one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from segue.engines.diffusion.contract import DenoiserContext, Row, Sample
from segue.messages.diffusion import DiffusionParams
from segue.models.shared.diffusion.denoiser.denoiser import Denoiser, embedded_guidance
from segue.models.shared.diffusion.denoiser.given import Given
from segue.models.shared.diffusion.denoiser.schedulers import set_spaced
from segue.models.shared.diffusion.latents import sides_of
from segue.models.shared.diffusion.sizes import pixels_per_latent

IMAGE_PLACES = 10
"""Distance of reference images from each other, and of the first from the output, along the first of the four position
axes."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The inputs that are equal in all calls of a sample, kept on the device so that steps copy nothing from the
    host."""

    text_ids: torch.Tensor
    """[1, text tokens, 4] long"""
    image_ids: torch.Tensor
    """[1, image tokens, 4] long: of the output image, then of the reference images."""
    images: torch.Tensor | None
    """[1, tokens, features]: the reference images. In every call their tokens follow the output image's; they get no
    prediction."""


class Flux2Denoiser(Denoiser):
    """`DiffusionModel`. The distilled model takes the guidance scale as an input per row; Klein adds a second row.

    The network has no text masks: rows of a call must have texts of equal length, and images of equal sizes.
    """

    def __init__(self, ctx: DenoiserContext) -> None:
        super().__init__(ctx)
        self._scale = 2 * pixels_per_latent(ctx.model_dir)

    def noise_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        return self.network.config.in_channels, *self._sides(params)

    def packed(self, noise: torch.Tensor, given: Given) -> torch.Tensor:
        return noise.flatten(2).transpose(1, 2)

    def set_timesteps(self, scheduler: Any, latents: torch.Tensor, params: DiffusionParams) -> list[torch.Tensor]:
        return set_spaced(scheduler, params, shift(latents.shape[1], params.num_inference_steps or 1), self.device)

    def bucket_of(self, latents: torch.Tensor, given: Given, conditions: Sequence[Any]) -> Hashable:
        shapes = tuple(tuple(image["latents"].shape) for image in given.images(self.device))
        return (super().bucket_of(latents, given, conditions), shapes, len(conditions[0]))

    def other_tokens(self, sample: Sample) -> int:
        return max(map(len, sample.conditions))

    def conditions(self, given: Given) -> list[torch.Tensor]:
        """Prompt embeddings, [text tokens, features] each."""
        return [text["embeds"].to(self.dtype) for text in given.texts(self.device)]

    def trial_conditions(self, params: DiffusionParams) -> list[torch.Tensor]:
        return [torch.zeros(512, self.network.config.joint_attention_dim, dtype=self.dtype, device=self.device)]

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        first = rows[0].sample
        fixed: Fixed = first.state
        text = torch.stack([row.condition for row in rows])
        tokens = torch.cat([row.sample.latents for row in rows])
        if fixed.images is not None:
            tokens = torch.cat([tokens, torch.cat([row.sample.state.images for row in rows])], dim=1)
        guidance = embedded_guidance(rows) if self.network.config.guidance_embeds else None
        timesteps = torch.stack([row.sample.timestep for row in rows]).to(self.device, self.dtype)
        [predictions] = self.network(
            hidden_states=tokens,
            timestep=timesteps / 1000,
            guidance=guidance,
            encoder_hidden_states=text,
            txt_ids=fixed.text_ids,
            img_ids=fixed.image_ids,
            return_dict=False,
        )
        return [one[None, : first.latents.shape[1]] for one in predictions]

    def unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        return latents.transpose(1, 2).unflatten(2, self._sides(sample.params))

    def _samples(self, given: Given, conditions: list[Any]) -> Iterator[Sample]:
        images = [one["latents"].to(self.dtype) for one in given.images(self.device)]
        grids = [self._sides(given.params), *((image.shape[-2], image.shape[-1]) for image in images)]
        fixed = Fixed(
            _text_ids(len(conditions[0]))[None].to(self.device),
            torch.cat([_image_ids(IMAGE_PLACES * number, *grid) for number, grid in enumerate(grids)])[None].to(
                self.device
            ),
            torch.cat([image.flatten(1).T for image in images])[None] if images else None,
        )
        for sample in super()._samples(given, conditions):
            sample.state = fixed
            if fixed.images is not None:
                sample.given = fixed.images.shape[1]
                sample.tokens += sample.given
            yield sample

    def _sides(self, params: DiffusionParams) -> tuple[int, int]:
        """Height and width in tokens."""
        return sides_of(params, self._scale)


def shift(tokens: int, steps: int) -> float:
    """The shift of noise levels for an image of `tokens` tokens in `steps` steps: interpolated between two lines fitted
    for 10 and for 200 steps; beyond 4300 tokens the latter alone (the published sampling code of FLUX.2)."""
    of_10, of_200 = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return of_200
    slope = (of_200 - of_10) / 190.0
    return slope * steps + of_200 - 200.0 * slope


def _image_ids(which: int, height: int, width: int) -> torch.Tensor:
    """[tokens, 4]: the image, row and column of each token; the fourth axis is used by text."""
    places = torch.zeros(height, width, 4, dtype=torch.long)
    places[..., 0] = which
    places[..., 1] = torch.arange(height)[:, None]
    places[..., 2] = torch.arange(width)[None]
    return places.flatten(0, 1)


def _text_ids(tokens: int) -> torch.Tensor:
    """[tokens, 4]"""
    places = torch.zeros(tokens, 4, dtype=torch.long)
    places[:, 3] = torch.arange(tokens)
    return places
