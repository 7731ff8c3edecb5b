"""The encoders of pictures: the VAE's, which makes latents to go beside the noise, and CLIP's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from segue.engines.contract import LoadContext
from segue.models.diffusion.loading import load_component, load_encoder
from segue.models.diffusion.text_encoder import TextEncoder
from segue.models.wan.shape import Shape


class VaeEncoder(TextEncoder):
    """`ModuleAdapter`; `latents` of an item, float32: where the picture's latents take the place of noise (TI2V), they
    alone, [channels, 1, h, w]; else [mask + channels, frames, h, w], the mask being 1 where a frame is given, with one
    channel per frame of a latent."""

    key: ClassVar[str] = "pictures"
    names: ClassVar[tuple[str, ...]] = ("latents",)

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self._shape = Shape.of(ctx.model_dir)
        self._vae = load_component(ctx, "vae")
        config = self._vae.config
        self._mean = torch.tensor(config.latents_mean, device=self.device).reshape(-1, 1, 1, 1)
        self._std = torch.tensor(config.latents_std, device=self.device).reshape(-1, 1, 1, 1)

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        """One after the other: a video of pixels fills a device by itself."""
        return [{"latents": self._encode(**item)} for item in items]

    def _encode(self, first: torch.Tensor, last: torch.Tensor | None, frames: int) -> torch.Tensor:
        height, width, _ = first.shape
        video = torch.zeros(1, 3, frames, height, width, device=self.device, dtype=self._vae.dtype)
        video[0, :, 0] = self._pixels(first)
        if last is not None:
            video[0, :, -1] = self._pixels(last)
        latents = self._vae.encode(video, return_dict=False)[0].mode()[0].float()
        latents = (latents - self._mean) / self._std
        if self._shape.timestep_per_token:
            return latents
        along = self._shape.scale[0]
        mask = latents.new_zeros(along, *latents.shape[1:])
        mask[:, 0] = 1  # a latent of one frame counts as one of as many as the others have
        if last is not None:
            mask[-1, -1] = 1
        return torch.cat([mask, latents])

    def _pixels(self, picture: torch.Tensor) -> torch.Tensor:
        """uint8 [h, w, 3] → [3, h, w] in [-1, 1]."""
        return (picture.to(self.device).permute(2, 0, 1).float() / 255 * 2 - 1).to(self._vae.dtype)


class ImageEncoder(TextEncoder):
    """`ModuleAdapter`; `embeds` of an item: [pictures, tokens, hidden], the last hidden states but one."""

    key: ClassVar[str] = "looks"

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self._network = load_encoder(ctx, "image_encoder")

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        counts = [len(item["pixels"]) for item in items]
        pixels = torch.cat([item["pixels"] for item in items]).to(self.device, self._network.dtype)
        hidden = self._network(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
        return [{"embeds": part} for part in hidden.split(counts)]
