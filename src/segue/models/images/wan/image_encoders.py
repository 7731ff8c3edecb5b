"""The encoders of images: the VAE's, whose latents condition the denoiser, and CLIP's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from segue.engines.contract import LoadContext
from segue.models.images.wan.shape import Shape
from segue.models.shared.diffusion.loading import load_component, load_encoder
from segue.models.shared.diffusion.text_encoder import TextEncoder


class VaeEncoder(TextEncoder):
    """`ModuleModel`; `latents` of an item, float32. If the image's latents replace the noise (TI2V), they are
    [channels, 1, h, w]; else [mask + channels, frames, h, w], where the mask is 1 for given frames, with one channel
    per frame of a latent."""

    key: ClassVar[str] = "images"
    names: ClassVar[tuple[str, ...]] = ("latents",)

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self._shape = Shape.of(ctx.model_dir)
        self._vae = load_component(ctx, "vae")
        config = self._vae.config
        self._mean = torch.tensor(config.latents_mean, device=self.device).reshape(-1, 1, 1, 1)
        self._std = torch.tensor(config.latents_std, device=self.device).reshape(-1, 1, 1, 1)

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        """Encode one item after the other: the pixels of one video fill a device."""
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
        mask[:, 0] = 1  # the first latent has one frame but as many mask channels as the others
        if last is not None:
            mask[-1, -1] = 1
        return torch.cat([mask, latents])

    def _pixels(self, image: torch.Tensor) -> torch.Tensor:
        """uint8 [h, w, 3] → [3, h, w] in [-1, 1]."""
        return (image.to(self.device).permute(2, 0, 1).float() / 255 * 2 - 1).to(self._vae.dtype)


class ImageEncoder(TextEncoder):
    """`ModuleModel`; `embeds` of an item: [images, tokens, hidden], the second to last hidden states."""

    key: ClassVar[str] = "looks"

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self._network = load_encoder(ctx, "image_encoder")

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        counts = [len(item["pixels"]) for item in items]
        pixels = torch.cat([item["pixels"] for item in items]).to(self.device, self._network.dtype)
        hidden = self._network(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
        return [{"embeds": part} for part in hidden.split(counts)]
