"""The encoder of the VAE, for images to edit or to begin with."""

from __future__ import annotations

import torch

from segue.engines.contract import LoadContext
from segue.models.shared.diffusion.loading import load_component
from segue.models.shared.diffusion.vae import ImageEncoder


class QwenImageVaeEncoder(ImageEncoder):
    """`ModuleModel`: [3, height, width] in [-1, 1] → the distribution of its latents, normalised by channel:
    `mean` and `std`, [1, channels, h, w] each."""

    names = ("mean", "std")

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self._vae = load_component(ctx, "vae")
        shape = (1, self._vae.config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(self._vae.config.latents_mean, device=self.device, dtype=self.dtype).reshape(shape)
        self._std = torch.tensor(self._vae.config.latents_std, device=self.device, dtype=self.dtype).reshape(shape)

    def encode_alike(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        [found] = self._vae.encode(images[:, :, None].to(self.dtype), return_dict=False)
        mean, std = (found.mean - self._mean) / self._std, found.std / self._std
        return {"mean": mean.transpose(1, 2), "std": std.transpose(1, 2)}
