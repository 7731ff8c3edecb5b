"""Images to codes and back, by vector quantisation (van den Oord et al., 2017)."""

from __future__ import annotations

import torch
from torch import nn

from action_video.configuration import ActionVideoConfig


class ImageTokenizer(nn.Module):
    """Each code stands for a square of `downsampling` pixels."""

    def __init__(self, config: ActionVideoConfig) -> None:
        super().__init__()
        halvings = config.downsampling.bit_length() - 1
        width = config.image_channels
        self.side = config.image_size // config.downsampling
        self.codebook = nn.Embedding(config.codebook_size, config.code_width)
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            *(layer for _ in range(halvings) for layer in (nn.SiLU(), nn.Conv2d(width, width, 4, 2, 1))),
            nn.SiLU(),
            nn.Conv2d(width, config.code_width, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(config.code_width, width, 1),
            *(layer for _ in range(halvings) for layer in (nn.SiLU(), nn.ConvTranspose2d(width, width, 4, 2, 1))),
            nn.SiLU(),
            nn.Conv2d(width, 3, 3, padding=1),
            nn.Tanh(),
        )

    def encode(self, pixels: torch.Tensor) -> torch.LongTensor:
        """[n, 3, height, width] in [-1, 1] → [n, tokens]."""
        vectors = self.encoder(pixels).flatten(2).transpose(1, 2)
        return torch.cdist(vectors, self.codebook.weight).argmin(-1)

    def decode(self, codes: torch.LongTensor) -> torch.Tensor:
        """[n, tokens] → [n, 3, height, width] in [-1, 1]."""
        vectors = self.codebook(codes).transpose(1, 2)
        return self.decoder(vectors.unflatten(2, (self.side, self.side)))
