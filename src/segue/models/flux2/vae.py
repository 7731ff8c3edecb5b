"""The picture VAE of Flux 2 (diffusers' `AutoencoderKLFlux2`): 2 by 2 of its latents are one token, whose features are
brought to mean 0 and variance 1 by statistics that it carries along (a batch norm's)."""

from __future__ import annotations

from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.models.diffusion.decoder import Decoder
from segue.models.diffusion.loading import load_component
from segue.models.diffusion.picture_encoder import PictureEncoder
from segue.models.diffusion.squares import to_latents, to_tokens


class Flux2Decoder(Decoder):
    """`ModuleAdapter`; latents are [B, features, h, w], a token each."""

    @property
    def scale(self) -> int:
        return int(2 ** len(self.vae.config.block_out_channels))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        mean, std = _statistics(self.vae, latents)
        height, width = latents.shape[-2:]
        tokens = latents.flatten(2).transpose(1, 2) * std + mean
        [pictures] = self.vae.decode(to_latents(tokens, 2 * height, 2 * width), return_dict=False)
        assert isinstance(pictures, torch.Tensor)
        return pictures


class Flux2Encoder(PictureEncoder):
    """`ModuleAdapter`: [3, H, W] in [-1, 1] → `latents`, [features, h, w], as the denoiser has them: the most likely
    ones, no noise."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self.vae = load_component(ctx, "vae")

    def encode_alike(self, pictures: torch.Tensor) -> dict[str, torch.Tensor]:
        [seen] = self.vae.encode(pictures.to(self.dtype), return_dict=False)
        latents = seen.mode()
        mean, std = _statistics(self.vae, latents)
        tokens = (to_tokens(latents) - mean) / std
        sides = (latents.shape[-2] // 2, latents.shape[-1] // 2)
        return {"latents": tokens.transpose(1, 2).unflatten(2, sides)}


def _statistics(vae: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each feature of a token."""
    std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    return vae.bn.running_mean.to(like), std.to(like)
