"""Convert between the VAE's latents and the denoiser's tokens: 2 by 2 latents form one token."""

from __future__ import annotations

import torch

from segue.models.shared.diffusion import latents as squares


def to_tokens(latents: torch.Tensor) -> torch.Tensor:
    """[B, 1, C, h, w] → [B, h/2 · w/2, 4 C]."""
    return squares.to_tokens(latents[:, 0])


def to_latents(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[B, h/2 · w/2, 4 C] → [B, C, 1, h, w]; `height`, `width`: h and w."""
    return squares.to_latents(tokens, height, width)[:, :, None]
