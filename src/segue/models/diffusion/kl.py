"""The picture VAE of Stable Diffusion (diffusers' `AutoencoderKL`), whose latents are scaled and shifted as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from segue.models.diffusion.decoder import Decoder
from segue.models.diffusion.loading import component_config
from segue.models.diffusion.picture_encoder import PictureEncoder


def pixels_per_latent(model_dir: Path) -> int:
    """In height and in width, from the VAE's config."""
    return int(2 ** (len(component_config(model_dir, "vae").get("block_out_channels", (0,))) - 1))


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
    """`ModuleAdapter`; of a picture: `mean` and `std` [channels, h, w] of its latents, as the denoiser has them."""

    names = ("mean", "std")

    def encode(self, pixels: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        config: Any = self.vae.config
        seen = self.vae.encode(torch.stack(list(pixels)).to(self.device, self.dtype)).latent_dist
        means = (seen.mean - (config.shift_factor or 0.0)) * config.scaling_factor
        stds = seen.std * config.scaling_factor
        return [{"mean": mean, "std": std} for mean, std in zip(means, stds, strict=True)]
