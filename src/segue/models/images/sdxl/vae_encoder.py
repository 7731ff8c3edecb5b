"""The encoder of the VAE, for images to begin with."""

from __future__ import annotations

import torch

from segue.engines.contract import LoadContext
from segue.models.images.sdxl.spaces import to_network, vae_dtype
from segue.models.shared.diffusion.loading import load_component
from segue.models.shared.diffusion.vae import ImageEncoder


class SdxlVaeEncoder(ImageEncoder):
    """`ModuleModel`: [3, height, width] in [-1, 1] → the distribution of its latents in the denoiser's scaling, from
    which the denoiser draws with the request's seed: `mean` and `std`, [4, h, w] each."""

    names = ("mean", "std")

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self._vae = load_component(ctx, "vae", dtype=vae_dtype(ctx.model_dir, ctx.dtype))

    def encode_alike(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        [found] = self._vae.encode(images.to(self._vae.dtype), return_dict=False)
        mean = to_network(self._vae.config, found.mean)
        return {"mean": mean, "std": to_network(self._vae.config, found.mean + found.std) - mean}
