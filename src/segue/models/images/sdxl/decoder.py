"""The decoder of the VAE."""

from __future__ import annotations

import torch

from segue.engines.contract import LoadContext
from segue.models.images.sdxl.spaces import to_vae, vae_dtype
from segue.models.shared.diffusion.sizes import pixels_per_latent
from segue.models.shared.diffusion.vae import Decoder


class SdxlDecoder(Decoder):
    """`ModuleModel`; latents are [B, 4, h, w]."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx, dtype=vae_dtype(ctx.model_dir, ctx.dtype))
        self._scale = pixels_per_latent(ctx.model_dir)

    @property
    def scale(self) -> int:
        return self._scale

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        [images] = self.vae.decode(to_vae(self.vae.config, latents), return_dict=False)
        return images
