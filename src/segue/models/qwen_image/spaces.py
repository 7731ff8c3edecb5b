"""Between pixels, the VAE's latents and the denoiser's tokens: 2 by 2 latents are one token."""

from __future__ import annotations

from pathlib import Path

import torch

from segue.models.diffusion.loading import component_config


def pixels_per_latent(model_dir: Path) -> int:
    """In height and in width, from the VAE's config."""
    return 2 ** len(component_config(model_dir, "vae").get("temperal_downsample", (False, True, True)))


def to_tokens(latents: torch.Tensor) -> torch.Tensor:
    """[B, 1, C, h, w] → [B, h/2 · w/2, 4 C]."""
    batch, _, channels, height, width = latents.shape
    squares = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, 4 * channels)


def to_latents(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[B, h/2 · w/2, 4 C] → [B, C, 1, h, w]; `height`, `width`: h and w."""
    batch, _, features = tokens.shape
    squares = tokens.reshape(batch, height // 2, width // 2, features // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, features // 4, 1, height, width)
