"""Latents of the VAE as rows of the decoder, and its hidden states as velocities.

n tokens of latents, P numbers in a token, H hidden size of the decoder.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from segue.models.omni.bagel.config import Config
from segue.models.omni.bagel.vision import PositionTable

_FREQUENCIES = 128
_LONGEST_PERIOD = 10000


class TimestepEmbedder(nn.Module):
    """A noise level in [0, 1] as a vector of the decoder's width."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        first = nn.Linear(2 * _FREQUENCIES, hidden)
        self.mlp = nn.Sequential(first, nn.SiLU(), nn.Linear(hidden, hidden))

    def forward(self, level: Tensor) -> Tensor:
        """[…] → […, H]."""
        steps = torch.arange(_FREQUENCIES, dtype=torch.float32, device=level.device) / _FREQUENCIES
        angles = level.float()[..., None] * torch.exp(-math.log(_LONGEST_PERIOD) * steps)
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        out: Tensor = self.mlp(waves.to(self.mlp.get_parameter("0.weight").dtype))
        return out


class LatentSpace(nn.Module):
    """The way into the decoder and out of it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.llm.hidden_size
        self.vae2llm = nn.Linear(config.token_channels, hidden)
        self.time_embedder = TimestepEmbedder(hidden)
        self.latent_pos_embed = PositionTable(config.latent_side, hidden)
        self.llm2vae = nn.Linear(hidden, config.token_channels)

    def rows(self, tokens: Tensor, at: Tensor, level: Tensor, image: Tensor | None = None) -> Tensor:
        """[n, P] → [n, H]. `at`: their places [n]; `level`: the noise level [], 0 for the latents of an image that is
        given, 1 for pure noise; or that of each image, with the `image` of each token [n]."""
        time = self.time_embedder(level)
        out: Tensor = self.vae2llm(tokens) + (time if image is None else time[image]) + self.latent_pos_embed(at)
        return out

    def velocity(self, hidden: Tensor) -> Tensor:
        """Final hidden states [n, H] → [n, P], which point from the image to the noise."""
        out: Tensor = self.llm2vae(hidden)
        return out
