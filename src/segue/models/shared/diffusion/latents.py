"""Convert between latents and the tokens of a denoiser that packs 2 by 2 of them into one, and count them."""

from __future__ import annotations

import torch

from segue.messages.diffusion import DiffusionParams


def sides_of(params: DiffusionParams, scale: int) -> tuple[int, int]:
    """Height and width of the output in units of `scale` pixels; the input stage has set both."""
    assert params.height is not None
    assert params.width is not None
    return params.height // scale, params.width // scale


def to_tokens(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] → [B, h/2 · w/2, 4 C]."""
    batch, channels, height, width = latents.shape
    squares = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, 4 * channels)


def to_latents(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[B, h/2 · w/2, 4 C] → [B, C, h, w]; `height`, `width`: h and w."""
    batch, _, features = tokens.shape
    squares = tokens.reshape(batch, height // 2, width // 2, features // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, features // 4, height, width)
