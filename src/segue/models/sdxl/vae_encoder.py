"""The encoder of the VAE, for pictures to begin with."""

from __future__ import annotations

import torch

from segue.engines.contract import LoadContext
from segue.models.diffusion.loading import load_component
from segue.models.diffusion.picture_encoder import PictureEncoder
from segue.models.sdxl.spaces import to_network, vae_dtype


class SdxlVaeEncoder(PictureEncoder):
    """`ModuleAdapter`: [3, height, width] in [-1, 1] → the distribution of its latents, of which the denoiser draws by
    the request's seed, as the denoiser has them: `mean` and `std`, [4, h, w] each."""

    names = ("mean", "std")

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self._vae = load_component(ctx, "vae", dtype=vae_dtype(ctx.model_dir, ctx.dtype))

    def encode_alike(self, pictures: torch.Tensor) -> dict[str, torch.Tensor]:
        [found] = self._vae.encode(pictures.to(self._vae.dtype), return_dict=False)
        mean = to_network(self._vae.config, found.mean)
        return {"mean": mean, "std": to_network(self._vae.config, found.mean + found.std) - mean}
