"""The decoder of Qwen-Image's VAE, a video VAE: an image is a video of one frame."""

from __future__ import annotations

import torch

from segue.engines.contract import LoadContext
from segue.models.shared.diffusion.vae import Decoder


class QwenImageDecoder(Decoder):
    """`ModuleModel`; latents are [B, channels, 1, h, w], normalised by channel."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        config = self.vae.config
        shape = (1, config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(config.latents_mean, device=self.device, dtype=self.dtype).reshape(shape)
        self._std = torch.tensor(config.latents_std, device=self.device, dtype=self.dtype).reshape(shape)

    def warm_up(self) -> None:
        self.pixels(torch.zeros(1, self.vae.config.z_dim, 1, 8, 8))

    @property
    def scale(self) -> int:
        return int(self.vae.spatial_compression_ratio)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        [frames] = self.vae.decode(latents * self._std + self._mean, return_dict=False)
        return frames[:, :, 0]
