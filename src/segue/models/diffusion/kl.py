"""The picture VAE of Stable Diffusion (diffusers' `AutoencoderKL`), whose latents are scaled and shifted as a whole."""

from __future__ import annotations

import torch

from segue.engines.contract import LoadContext
from segue.models.diffusion.decoder import Decoder
from segue.models.diffusion.loading import load_component
from segue.models.diffusion.picture_encoder import PictureEncoder


class KLDecoder(Decoder):
    """`ModuleAdapter`; latents are [B, channels, h, w]."""

    @property
    def scale(self) -> int:
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        config = self.vae.config
        [pictures] = self.vae.decode(latents / config.scaling_factor + (config.shift_factor or 0.0), return_dict=False)
        assert isinstance(pictures, torch.Tensor)
        return pictures


class KLEncoder(PictureEncoder):
    """`ModuleAdapter`: [3, H, W] in [-1, 1] → the distribution of its latents, as the denoiser has them: `mean` and
    `std`, [channels, h, w] each."""

    names = ("mean", "std")

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self.vae = load_component(ctx, "vae")

    def encode_alike(self, pictures: torch.Tensor) -> dict[str, torch.Tensor]:
        config = self.vae.config
        [seen] = self.vae.encode(pictures.to(self.dtype), return_dict=False)
        shift = config.shift_factor or 0.0
        return {"mean": (seen.mean - shift) * config.scaling_factor, "std": seen.std * config.scaling_factor}
