"""The denoiser: double-stream, then single-stream transformer over text and picture tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.engines.diffusion.contract import Row, Sample
from segue.messages.diffusion import DiffusionParams
from segue.models.diffusion.denoiser import Denoiser
from segue.models.diffusion.given import Given
from segue.models.diffusion.schedulers import set_spaced
from segue.models.diffusion.sizes import pixels_per_latent
from segue.models.diffusion.squares import sides_of

PICTURE_PLACES = 10
"""How far pictures to work from are from each other, and the first from the one that is made, in the first of the four
dimensions of places."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """What a request works from: seen in every call behind the picture that is made, and not predicted."""

    tokens: torch.Tensor
    """[1, tokens of all, features]."""
    places: torch.Tensor
    """[tokens of all, 4]."""


class Flux2Denoiser(Denoiser):
    """`DiffusionAdapter`. Guidance of the distilled model is a number each row has; Klein's is a second row.

    The network masks no text: rows of one call have texts of one length, and pictures of the same sizes.
    """

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self._scale = 2 * pixels_per_latent(ctx.model_dir)

    def noise_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        return self.network.config.in_channels, *self._sides(params)

    def packed(self, noise: torch.Tensor, given: Given) -> torch.Tensor:
        return noise.flatten(2).transpose(1, 2)

    def set_timesteps(self, scheduler: Any, latents: torch.Tensor, params: DiffusionParams) -> list[torch.Tensor]:
        return set_spaced(scheduler, params, shift(latents.shape[1], params.num_inference_steps or 1), self.device)

    def bucket_of(self, latents: torch.Tensor, given: Given, conditions: Sequence[Any]) -> Hashable:
        shapes = tuple(tuple(picture["latents"].shape) for picture in given.pictures(self.device))
        return (super().bucket_of(latents, given, conditions), shapes, len(conditions[0]))

    def tokens_beside(self, sample: Sample) -> int:
        return max(map(len, sample.conditions))

    def conditions(self, given: Given) -> list[torch.Tensor]:
        """[text tokens, features] each."""
        return [text["embeds"].to(self.dtype) for text in given.texts(self.device)]

    def trial_conditions(self, params: DiffusionParams) -> list[torch.Tensor]:
        return [torch.zeros(512, self.network.config.joint_attention_dim, dtype=self.dtype, device=self.device)]

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        first = rows[0].sample
        text = torch.stack([row.condition for row in rows])
        tokens = torch.cat([row.sample.latents for row in rows])
        places = _places(0, *self._sides(first.params))
        if first.state is not None:
            tokens = torch.cat([tokens, torch.cat([row.sample.state.tokens for row in rows])], dim=1)
            places = torch.cat([places, first.state.places])
        guidance = None
        if self.network.config.guidance_embeds:
            scales = [row.sample.params.guidance_scale or 0.0 for row in rows]
            guidance = torch.tensor(scales, device=self.device, dtype=torch.float32)
        words = torch.zeros(text.shape[1], 4, dtype=torch.long)
        words[:, 3] = torch.arange(text.shape[1])
        timesteps = torch.stack([row.sample.timestep for row in rows]).to(self.device, self.dtype)
        [predictions] = self.network(
            hidden_states=tokens,
            timestep=timesteps / 1000,
            guidance=guidance,
            encoder_hidden_states=text,
            txt_ids=words[None].to(self.device),
            img_ids=places[None].to(self.device),
            return_dict=False,
        )
        return [one[None, : first.latents.shape[1]] for one in predictions]

    def unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        return latents.transpose(1, 2).unflatten(2, self._sides(sample.params))

    def _samples(self, given: Given, conditions: list[Any]) -> Iterator[Sample]:
        pictures = _pictures([one["latents"].to(self.dtype) for one in given.pictures(self.device)])
        for sample in super()._samples(given, conditions):
            if pictures is not None:
                sample.state = pictures
                sample.given = pictures.tokens.shape[1]
                sample.tokens += sample.given
            yield sample

    def _sides(self, params: DiffusionParams) -> tuple[int, int]:
        """Height and width in tokens."""
        return sides_of(params, self._scale)


def shift(tokens: int, steps: int) -> float:
    """How far noise levels are shifted for pictures of so many tokens in so many steps: between two straight lines that
    were fitted for 10 and for 200 steps; beyond 4300 tokens the latter alone (the published sampling code of
    FLUX.2)."""
    of_10, of_200 = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return of_200
    slope = (of_200 - of_10) / 190.0
    return slope * steps + of_200 - 200.0 * slope


def _pictures(encoded: Sequence[torch.Tensor]) -> Pictures | None:
    """`encoded`: [features, height, width] each."""
    if not encoded:
        return None
    tokens = torch.cat([one.flatten(1).T for one in encoded])
    places = [
        _places(PICTURE_PLACES * number, one.shape[-2], one.shape[-1]) for number, one in enumerate(encoded, start=1)
    ]
    return Pictures(tokens[None], torch.cat(places))


def _places(which: int, height: int, width: int) -> torch.Tensor:
    """[tokens, 4]: the picture, row and column of each; the fourth is of words."""
    places = torch.zeros(height, width, 4, dtype=torch.long)
    places[..., 0] = which
    places[..., 1] = torch.arange(height)[:, None]
    places[..., 2] = torch.arange(width)[None]
    return places.flatten(0, 1)
