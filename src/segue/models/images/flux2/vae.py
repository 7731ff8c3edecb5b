"""The image VAE of Flux 2 (diffusers' `AutoencoderKLFlux2`): 2 by 2 of its latents form one token, whose features are
normalised to mean 0 and variance 1 by stored statistics (a batch norm's)."""

from __future__ import annotations

from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.models.shared.diffusion.latents import to_latents, to_tokens
from segue.models.shared.diffusion.loading import load_component
from segue.models.shared.diffusion.vae import Decoder, ImageEncoder


class Flux2Decoder(Decoder):
    """`ModuleModel`; latents are [B, features, h, w], one token each."""

    @property
    def scale(self) -> int:
        return int(2 ** len(self.vae.config.block_out_channels))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        mean, std = _statistics(self.vae, latents)
        height, width = latents.shape[-2:]
        tokens = latents.flatten(2).transpose(1, 2) * std + mean
        [images] = self.vae.decode(to_latents(tokens, 2 * height, 2 * width), return_dict=False)
        assert isinstance(images, torch.Tensor)
        return images


class Flux2Encoder(ImageEncoder):
    """`ModuleModel`: [3, H, W] in [-1, 1] → `latents`, [features, h, w], in the denoiser's scaling: the mode of the
    distribution, without noise."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self.vae = load_component(ctx, "vae")

    def encode_alike(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        [seen] = self.vae.encode(images.to(self.dtype), return_dict=False)
        latents = seen.mode()
        mean, std = _statistics(self.vae, latents)
        tokens = (to_tokens(latents) - mean) / std
        sides = (latents.shape[-2] // 2, latents.shape[-1] // 2)
        return {"latents": tokens.transpose(1, 2).unflatten(2, sides)}


def _statistics(vae: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each token feature."""
    std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    return vae.bn.running_mean.to(like), std.to(like)
