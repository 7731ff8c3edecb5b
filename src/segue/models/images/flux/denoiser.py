"""The denoisers: a transformer over text and image tokens, first in two streams, then in one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from segue.engines.diffusion.contract import DenoiserContext, Row, Sample
from segue.messages.diffusion import DiffusionParams
from segue.models.shared.diffusion.denoiser.denoiser import Denoiser, embedded_guidance
from segue.models.shared.diffusion.denoiser.given import Given
from segue.models.shared.diffusion.denoiser.schedulers import set_shifted
from segue.models.shared.diffusion.latents import sides_of, to_latents, to_tokens
from segue.models.shared.diffusion.prompts import Condition, stacked
from segue.models.shared.diffusion.sizes import pixels_per_latent


class FluxDenoiser(Denoiser):
    """`DiffusionModel`: text to image, and image to image, which starts from a noised image (`strength`).

    Distilled models take the guidance scale as an input per row; true guidance adds a second row. The network has no
    text masks: the texts of a call's rows must have equal lengths.
    """

    def __init__(self, ctx: DenoiserContext) -> None:
        super().__init__(ctx)
        self._scale = pixels_per_latent(ctx.model_dir)
        self._channels: int = self.network.config.in_channels // 4

    def noise_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        return self._channels, *self._sides(params)

    def begins_with(self, given: Given) -> dict[str, torch.Tensor] | None:
        return next(iter(given.images(self.device)), None)

    def packed(self, noise: torch.Tensor, given: Given) -> torch.Tensor:
        return to_tokens(noise)

    def set_timesteps(self, scheduler: Any, latents: torch.Tensor, params: DiffusionParams) -> list[torch.Tensor]:
        return set_shifted(scheduler, params, latents.shape[1], self.device)

    def bucket_of(self, latents: torch.Tensor, given: Given, conditions: Sequence[Any]) -> Hashable:
        return (*self._sides(given.params), len(conditions[0].text))

    def other_tokens(self, sample: Sample) -> int:
        return max(len(one.text) for one in sample.conditions)

    def conditions(self, given: Given) -> list[Any]:
        clips, t5s = given.texts(self.device, "clip_encoder"), given.texts(self.device, "t5_encoder")
        return [
            Condition(t5["embeds"].to(self.dtype), clip["pooled"].to(self.dtype))
            for clip, t5 in zip(clips, t5s, strict=True)
        ]

    def trial_conditions(self, params: DiffusionParams) -> list[Any]:
        config = self.network.config
        text = torch.zeros(512, config.joint_attention_dim, dtype=self.dtype, device=self.device)
        return [Condition(text, text.new_zeros(config.pooled_projection_dim))]

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        text, pooled = stacked([row.condition for row in rows])
        height, width = self._sides(rows[0].sample.params)
        return self._call(
            rows, torch.cat([row.sample.latents for row in rows]), text, pooled, self._places(0, height, width)
        )

    def _call(
        self, rows: Sequence[Row], tokens: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor, places: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        guidance = embedded_guidance(rows) if self.network.config.guidance_embeds else None
        timesteps = torch.stack([row.sample.timestep for row in rows]).to(self.device, self.dtype)
        [predictions] = self.network(
            hidden_states=tokens,
            timestep=timesteps / 1000,
            guidance=guidance,
            pooled_projections=pooled,
            encoder_hidden_states=text,
            txt_ids=text.new_zeros(text.shape[1], 3),
            img_ids=places,
            return_dict=False,
        )
        return [one[None, : rows[0].sample.latents.shape[1]] for one in predictions]

    def guidance(self, sample: Sample) -> float:
        return sample.params.true_cfg_scale or 1.0

    def unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        return to_latents(latents, *self._sides(sample.params))

    def _places(self, which: int, height: int, width: int) -> torch.Tensor:
        """[tokens, 3]: the image, row and column of each token; `height`, `width` in latents."""
        places = torch.zeros(height // 2, width // 2, 3, device=self.device, dtype=self.dtype)
        places[..., 0] = which
        places[..., 1] += torch.arange(height // 2, device=self.device)[:, None]
        places[..., 2] += torch.arange(width // 2, device=self.device)[None]
        return places.flatten(0, 1)

    def _sides(self, params: DiffusionParams) -> tuple[int, int]:
        """Height and width in latents."""
        return sides_of(params, self._scale)


class Edited(NamedTuple):
    """The conditions of an edit: a prompt and the encoded image to edit."""

    text: torch.Tensor
    pooled: torch.Tensor
    image: torch.Tensor
    """[tokens, features]"""
    sides: tuple[int, int]
    """The image's height and width, in latents."""


class KontextDenoiser(FluxDenoiser):
    """`DiffusionModel`: the input image's tokens follow those that are denoised. With a mask, the tokens of the last
    input image: the edited image itself, or a reference for the repainted part."""

    def conditions(self, given: Given) -> list[Any]:
        plain = super().conditions(given)
        images = given.images(self.device)
        if not images:
            return plain
        mean = images[-1]["mean"].to(self.dtype)
        [tokens] = to_tokens(mean[None])
        return [Edited(one.text, one.pooled, tokens, (mean.shape[-2], mean.shape[-1])) for one in plain]

    def other_tokens(self, sample: Sample) -> int:
        first = sample.conditions[0]
        return super().other_tokens(sample) + (len(first.image) if isinstance(first, Edited) else 0)

    def bucket_of(self, latents: torch.Tensor, given: Given, conditions: Sequence[Any]) -> Hashable:
        first = conditions[0]
        return super().bucket_of(latents, given, conditions), first.sides if isinstance(first, Edited) else None

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        first = rows[0].condition
        if not isinstance(first, Edited):
            return super().predict(rows)
        text, pooled = stacked([Condition(row.condition.text, row.condition.pooled) for row in rows])
        images = torch.stack([row.condition.image for row in rows])
        tokens = torch.cat([torch.cat([row.sample.latents for row in rows]), images], dim=1)
        places = [self._places(0, *self._sides(rows[0].sample.params)), self._places(1, *first.sides)]
        return self._call(rows, tokens, text, pooled, torch.cat(places))

    def begins_with(self, given: Given) -> dict[str, torch.Tensor] | None:
        """Only with a mask: otherwise the edited image is a condition and the output begins with noise."""
        return None if given.mask is None else {"mean": given.images(self.device)[0]["mean"]}
