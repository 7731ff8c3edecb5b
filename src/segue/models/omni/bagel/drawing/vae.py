"""The VAE's two halves as stages: images that are edited become latents, drawn latents become images."""

from __future__ import annotations

from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.models.omni.bagel.config import read_config
from segue.models.omni.bagel.loading import load_vae
from segue.models.shared.diffusion.vae import KLDecoder, KLEncoder


class LatentEncoder(KLEncoder):
    """`ModuleModel`; in float32, as published."""

    def load(self, ctx: LoadContext) -> Any:
        self.dtype = torch.float32
        return load_vae(ctx, read_config(ctx.model_dir))


class LatentDecoder(KLDecoder):
    """`ModuleModel`; in float32, as published."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx, dtype=torch.float32)

    def warm_up(self) -> None:
        self.pixels(torch.zeros(1, self.vae.config.latent_channels, 8, 8))

    def load(self, ctx: LoadContext, component: str) -> Any:
        return load_vae(ctx, read_config(ctx.model_dir))
